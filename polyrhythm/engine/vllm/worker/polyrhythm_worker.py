"""Runs inside vLLM's worker, with vLLM's Python: takes a snapshot into the model, all of it verified before any of it is used.

`vllm serve … --worker-extension-cls polyrhythm_worker.WeightsOfARun`, called through `/collective_rpc`. Of Polyrhythm
nothing is installed there: what is to be loaded comes as a table, and what is imported is what vLLM itself needs.
"""

import json
import mmap
import os
from typing import Any

PROTOCOL = "1"


class WeightsOfARun:
    """Methods that vLLM mixes into its worker. Arguments and results are strings, or dicts of them."""

    def polyrhythm_hello(self: Any) -> dict[str, str]:
        """Who is here, and in which number format it computes."""
        return {"protocol": PROTOCOL, "number_format": str(self.model_config.dtype).removeprefix("torch.")}

    def polyrhythm_load(self: Any, path: str, num_bytes: str, table: str) -> dict[str, str]:
        """Load the tensors of a safetensors file. `refused` says why nothing was touched; an exception, that something was.

        `table` is JSON, for each tensor its name, safetensors type, shape, offset, number of bytes, BLAKE3 digest, and the
        first and number of the columns to negate.
        """
        rows = [_Row(*row) for row in json.loads(table)]
        try:
            content = _mapped(path, int(num_bytes))
            wrong = [row.name for row in rows if row.digest_of(content) != row.digest]
        except (OSError, ValueError) as error:
            return {"refused": f"{path}: {error}"}
        if wrong:
            return {"refused": f"{wrong[0]} of {path} is not what was published: digests differ"}
        self.model_runner.reload_weights(weights_iterator=((row.name, row.tensor(content)) for row in rows))
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
        self, name: str, dtype: str, shape: list[int], offset: int, num_bytes: int, digest: str, first: int, num: int
    ):
        self.name, self.dtype, self.shape = name, dtype, shape
        self.offset, self.num_bytes, self.digest = offset, num_bytes, digest
        self.first, self.num = first, num

    def digest_of(self, content: mmap.mmap) -> str:
        import blake3

        piece = memoryview(content)[self.offset : self.offset + self.num_bytes]
        return blake3.blake3(piece, max_threads=int(os.environ.get("OMP_NUM_THREADS") or 1)).hexdigest()

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
            raise ValueError(f"it has {size} bytes instead of {num_bytes}: the snapshot is torn")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
