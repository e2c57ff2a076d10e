"""One server base and one client base: credentials, limits, deadlines, errors and life cycle of everything that speaks HTTP here.

`server` with `listener` and `guard` is under every server, `client` (blocking) and `async_client` under every client.
A new page or sidecar adds routes with their scope and gets the rest.
"""
