"""Choice of free ports."""

import socket
from collections.abc import Iterator

import pytest

from lockstep.cli.ports import PortPicker, is_free, require_free
from lockstep.errors import ConfigError


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_port_in_use_is_refused_with_a_way_out(listening: int) -> None:
    """The message names the port and the flag to change it with."""
    with pytest.raises(ConfigError, match=rf"port {listening} is in use on 127\.0\.0\.1.*--port"):
        require_free("127.0.0.1", listening)


def test_free_port_is_accepted(listening: int) -> None:
    """A port that nothing listens on passes the check, and passing it does not take it."""
    picker = PortPicker()
    port = picker.take()
    require_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


def test_address_of_another_machine_is_refused() -> None:
    """An address that this machine does not have is told apart from a busy port."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:8000.*--host"):
        require_free("192.0.2.1", 8000)


def test_picker_never_repeats_and_stays_in_its_range() -> None:
    """Each port is handed out once, below the ephemeral range."""
    picker = PortPicker()
    ports = [picker.take() for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(20000 <= port <= 29999 for port in ports)


def test_picker_skips_ports_in_use(listening: int) -> None:
    """A row of ports does not go over one that is in use; an exhausted range is an error, not a loop."""
    picker = PortPicker(first=listening, last=listening)
    with pytest.raises(ConfigError, match="no 1 free TCP ports"):
        picker.take()


def test_row_of_ports_is_contiguous_and_free() -> None:
    """All ports of a row can be bound, and a later one does not overlap it."""
    picker = PortPicker()
    first = picker.take_range(4)
    assert all(is_free("127.0.0.1", first + index) for index in range(4))
    assert picker.take() not in range(first, first + 4)
