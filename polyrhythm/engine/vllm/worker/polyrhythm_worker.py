"""Runs inside vLLM's worker, with vLLM's Python: takes a snapshot into the model, all of it verified before any of it is used.

`vllm serve … --worker-extension-cls polyrhythm_worker.WeightsOfARun`, called through `/collective_rpc`. Of Polyrhythm
nothing is installed there: what is to be loaded comes as a table, and what is imported is what vLLM itself needs.
"""

import json
import mmap
import os
from typing import Any

PROTOCOL = "2"
RECEIVED = ""
"""The folder and the file of what has arrived in a broadcast."""


class WeightsOfARun:
    """Methods that vLLM mixes into its worker. Arguments and results are strings, or dicts of them."""

    polyrhythm_received: mmap.mmap | None = None
    """The tensors of the last broadcast, one after the other."""

    def polyrhythm_hello(self: Any) -> dict[str, str]:
        """Who is here, and in which number format it computes."""
        return {"protocol": PROTOCOL, "number_format": str(self.model_config.dtype).removeprefix("torch.")}

    def polyrhythm_receive(self: Any, num_bytes: str, url: str, credential: str, meeting: str) -> dict[str, str]:
        """Take part in a broadcast of so many bytes; `missed` says why nothing has arrived. The model is not touched.

        `meeting` is JSON: the number of the broadcast, our first member, the number of members, seconds.
        """
        from polyrhythm_meeting import receive  # pyright: ignore

        number, member, num_members, deadline_s = json.loads(meeting)
        received, self.polyrhythm_received = self.polyrhythm_received, None
        if received is None or len(received) != int(num_bytes):
            received = mmap.mmap(-1, int(num_bytes))  # kept for the next: new pages are what takes long
        try:
            receive(received, url, credential, number, member + self.rank, num_members, deadline_s)
        except (RuntimeError, OSError, ValueError) as error:
            return {"missed": f"{type(error).__name__}: {error}"}
        self.polyrhythm_received = received
        return {}

    def polyrhythm_load(self: Any, folder: str, files: str, table: str) -> dict[str, str]:
        """Load the tensors of safetensors files, or what was received.

        `refused` says why nothing was touched; an exception, that something was.

        `files` is JSON, the size of each. So is `table`: for each tensor its name, safetensors type, shape, file, offset there,
        number of bytes, pieces (offset in the tensor, number of bytes, BLAKE3 digest), and the first and number of the columns
        to negate.
        """
        rows = [_Row(*row) for row in json.loads(table)]
        try:
            if folder == RECEIVED:
                contents = {RECEIVED: self.polyrhythm_received}
            else:
                contents = {name: _mapped(os.path.join(folder, name), size) for name, size in json.loads(files).items()}
            wrong = [row.name for row in rows if not row.is_what_was_published(contents[row.file])]
        except (OSError, ValueError) as error:
            return {"refused": str(error)}
        if wrong:
            where = f"in {folder}" if folder else "as received"
            return {"refused": f"{wrong[0]} {where} is not what was published: digests differ"}
        self.model_runner.reload_weights(weights_iterator=((row.name, row.tensor(contents[row.file])) for row in rows))
        return {"repacked": ", ".join(self.polyrhythm_repack())}

    def polyrhythm_repack(self: Any) -> list[str]:
        """A reload processes only layers for which a tensor came. A tied head gets none, and keeps what it was packed from."""
        repacked = []
        for name, module in self.model_runner.get_model().named_modules():
            if hasattr(module, "num_embeddings") and hasattr(module, "quant_method") and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
                repacked.append(name)
        return repacked


class _Row:
    """A tensor in the file."""

    def __init__(
        self, name: str, dtype: str, shape: list[int], file: str, offset: int, num_bytes: int,
        pieces: list[tuple[int, int, str]], first: int, num: int,
    ):  # fmt: skip
        self.name, self.dtype, self.shape = name, dtype, shape
        self.file, self.offset, self.num_bytes, self.pieces = file, offset, num_bytes, pieces
        self.first, self.num = first, num

    def is_what_was_published(self, content: mmap.mmap) -> bool:
        import blake3

        threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
        for offset, num_bytes, digest in self.pieces:
            begin = self.offset + offset
            if blake3.blake3(memoryview(content)[begin : begin + num_bytes], max_threads=threads).hexdigest() != digest:
                return False
        return True

    def tensor(self, content: mmap.mmap) -> Any:
        import torch

        types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
                 "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
        dtype = types[self.dtype]
        count = self.num_bytes // dtype.itemsize
        tensor = torch.frombuffer(content, dtype=dtype, count=count, offset=self.offset).reshape(self.shape)
        if self.num:
            tensor = tensor.clone()  # the file is shared with everybody else
            tensor.narrow(-1, self.first, self.num).neg_()
        return tensor


def _mapped(path: str, num_bytes: int) -> mmap.mmap:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != num_bytes:
            raise ValueError(f"{path} has {size} bytes instead of {num_bytes}: the snapshot is torn")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
