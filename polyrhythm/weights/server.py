"""Snapshots for engines that cannot read the store's folder: the files of a version, and nothing else, over HTTP."""

import asyncio
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from polyrhythm.weights.snapshot import (
    MANIFEST_FILE,
    MAX_VERSION_DIGITS,
    WEIGHTS_FILES,
    loading_deadline_s,
    snapshot_folder,
)


class WeightServer:
    """Routes to be added to a service that checks tokens. A download that takes longer than the deadline for its bytes is cut off."""

    def __init__(self, root: Path, deadline_s: float):
        self._root = root
        self._deadline_s = deadline_s

    def routes(self) -> list[web.RouteDef]:
        return [web.get(rf"/weights/{{version:[0-9]{{1,{MAX_VERSION_DIGITS}}}}}/{{file}}", self._send)]

    async def _send(self, request: web.Request) -> web.StreamResponse:
        version, name = int(request.match_info["version"]), request.match_info["file"]
        path = snapshot_folder(self._root, version) / name
        is_of_a_version = name == MANIFEST_FILE or WEIGHTS_FILES.fullmatch(name)
        if not is_of_a_version or not await asyncio.to_thread(path.is_file):
            raise web.HTTPNotFound(text=f"weights v{version} have no such file here")
        num_bytes = (await asyncio.to_thread(path.stat)).st_size
        return TimedFileResponse(path, loading_deadline_s(self._deadline_s, num_bytes))


class TimedFileResponse(web.FileResponse):
    """A file that must have been taken within a deadline."""

    def __init__(self, path: Path, deadline_s: float):
        super().__init__(path)
        self._deadline_s = deadline_s

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Sends the whole file."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await super().prepare(request)
        except TimeoutError:
            request.protocol.force_close()
            raise ConnectionResetError("the client took a file too slowly") from None
