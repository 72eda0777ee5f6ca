import gc
import socket

from tests.load_tests.sse_server import serving


def test_who_connects_as_it_ends_leaves_no_socket_open():
    """One left would be a warning, and so an error, in whichever test comes after."""
    for _ in range(20):
        with serving() as running:
            address = ("127.0.0.1", running.port)
            sockets = [socket.create_connection(address) for _ in range(8)]
        for one in sockets:
            one.close()
    gc.collect()
