"""The health check: one HTTP request to the server in this container."""

from __future__ import annotations

import http.client
import os


def healthy(port: int, host: str = "127.0.0.1", timeout: float = 5.0) -> str | None:
    """None where ``GET /health`` answers 200; otherwise what happened instead."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except OSError as error:
        return f"127.0.0.1:{port}: {error.strerror or error}"
    finally:
        connection.close()
    return None if status == 200 else f"127.0.0.1:{port}/health answered {status}"


def port() -> int:
    """The port that the server listens on inside the container."""
    return int(os.environ.get("STRATA_PORT") or 8000)
