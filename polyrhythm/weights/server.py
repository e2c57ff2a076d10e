"""Snapshots for engines that cannot read the store's folder: two files of a version, and nothing else, over HTTP."""

import asyncio
from pathlib import Path

from aiohttp import web

from polyrhythm.weights.snapshot import MANIFEST_FILE, MAX_VERSION_DIGITS, WEIGHTS_FILE, snapshot_folder

SERVED = (MANIFEST_FILE, WEIGHTS_FILE)


class WeightServer:
    """Routes to be added to a service that checks tokens. A download that takes longer than the deadline is cut off."""

    def __init__(self, root: Path, deadline_s: float):
        self._root = root
        self._deadline_s = deadline_s

    def routes(self) -> list[web.RouteDef]:
        return [web.get(rf"/weights/{{version:\d{{1,{MAX_VERSION_DIGITS}}}}}/{{file}}", self._send)]

    async def _send(self, request: web.Request) -> web.StreamResponse:
        version, name = int(request.match_info["version"]), request.match_info["file"]
        path = snapshot_folder(self._root, version) / name
        if name not in SERVED or not await asyncio.to_thread(path.is_file):
            raise web.HTTPNotFound(text=f"weights v{version} have no such file here")
        response = web.FileResponse(path)
        try:
            async with asyncio.timeout(self._deadline_s):
                await response.prepare(request)  # sends the whole file
        except TimeoutError:
            request.protocol.force_close()
        return response
