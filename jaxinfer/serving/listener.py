"""The socket a server listens on; imports nothing heavy, so that a port in use is known at once."""

import contextlib
import errno
import socket


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not listen yet.

    Raises:
        OSError: the address cannot be used; the message says so to a person.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a former server's connections may linger
        listener.bind(address)
    except OSError as error:
        with contextlib.suppress(OSError):
            listener.close()
        hint = "; choose another --port, or stop the program that has it" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}{hint}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Returns the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
