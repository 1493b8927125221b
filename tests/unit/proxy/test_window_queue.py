"""The order in which requests leave the queue: the lane ahead, then by priority, then as they came."""

from lockstep.errors import InvalidRequestError, LockstepError
from proxy.window_queue import WindowQueue


class Item:
    def __init__(self, name: str) -> None:
        self.name = name


class Gate:
    """Takes what it has room for."""

    def __init__(self) -> None:
        self.room = 0
        self.sent: list[str] = []
        self.queue = WindowQueue(self.send, self.fail)

    def send(self, item: Item) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.sent.append(item.name)
        return True

    def fail(self, item: Item, error: LockstepError) -> None:
        self.sent.append(f"{item.name}: {error}")

    def put(self, name: str, priority: int = 0, *, ahead: bool = False) -> Item:
        item = Item(name)
        self.queue.put(item, priority, ahead)
        return item

    def open(self, room: int) -> list[str]:
        self.room = room
        self.queue.pump()
        return self.sent


def test_lower_numbers_first_and_first_in_first_out_among_equals() -> None:
    """As vLLM's own priority: lower is earlier."""
    gate = Gate()
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        gate.put(name, priority)
    assert gate.open(5) == ["c", "e", "a", "d", "b"]
    assert len(gate.queue) == 0


def test_requests_sent_before_are_ahead_of_any_priority() -> None:
    gate = Gate()
    gate.put("new", -10)
    gate.put("again", 7, ahead=True)
    assert gate.open(2) == ["again", "new"]


def test_a_request_that_finds_no_room_keeps_its_place() -> None:
    gate = Gate()
    gate.put("a")
    gate.put("b")
    gate.open(0)
    gate.put("c")
    assert gate.open(3) == ["a", "b", "c"]


def test_a_request_that_is_refused_while_it_is_sent_is_not_lost() -> None:
    """The node's answer puts it into the lane ahead, before the queue hears that it was sent."""
    sent: list[str] = []
    item = Item("a")

    def send(item: Item) -> bool:
        sent.append(item.name)
        if len(sent) < 3:
            queue.put(item, ahead=True)
        return True

    queue = WindowQueue(send, lambda item, error: None)
    queue.put(item)
    assert sent == ["a"] * 3
    assert len(queue) == 0


def test_discarded_requests_leave_no_lane_behind() -> None:
    gate = Gate()
    items = [gate.put(str(number), number) for number in range(3)]
    gate.queue.discard(items[1])
    gate.queue.discard(items[1])
    assert len(gate.queue) == 2
    assert gate.open(9) == ["0", "2"]
    assert gate.queue.head() is None


def test_last_below_is_the_one_that_would_wait_longest() -> None:
    """And only one of a worse priority: those of the same have come earlier."""
    gate = Gate()
    gate.put("a", 0)
    gate.put("b", 3)
    last = gate.put("c", 3)
    assert gate.queue.last_below(0) is last
    assert gate.queue.last_below(3) is None


def test_a_request_that_cannot_be_served_does_not_hold_up_the_others() -> None:
    def send(item: Item) -> bool:
        if item.name == "bad":
            raise InvalidRequestError("no")
        return gate.send(item)

    gate = Gate()
    gate.queue = WindowQueue(send, gate.fail)
    gate.room = 2
    for name in ("bad", "good"):
        gate.put(name)
    assert gate.sent == ["bad: no", "good"]
