"""Reading the body of a request: of the expected type, and within a deadline."""

import asyncio

from aiohttp import web

_BODY_DEADLINE_S = 30.0


async def read_body(request: web.Request, content_type: str) -> bytes:
    # Asking for the type also keeps out web pages: a browser sends other types than forms only with permission.
    if request.content_type != content_type:
        raise web.HTTPUnsupportedMediaType(text=f"send {content_type}")
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            return await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text="the request body came too slowly") from error
