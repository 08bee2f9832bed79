"""A webhook that writes what it gets into a file before it answers: `python -m benchmarks.clusters.bridging.hook PORT FILE`."""

from __future__ import annotations

import os
import sys

from aiohttp import web

MAX_BODY = 64 << 20


def main(port: int, file: str) -> None:
    """Serve until it is killed."""
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def post(request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        os.write(out, "".join(f"{each['key']} {int(each['body'])}\n" for each in messages).encode())
        return web.Response()

    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/", post)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
