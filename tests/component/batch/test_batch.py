"""`lockstep batch` as a process, against a small HTTP server in the endpoint's place."""

import signal
import socket
import threading
from pathlib import Path

from component.batch.conftest import Batch, wait_for
from component.batch.endpoint import Answer, Endpoint


def test_answers_and_failures_go_to_their_files(batch: Batch, endpoint: Endpoint) -> None:
    """An answer as it came, a refusal with its body; both can be found in the proxy's log by their id."""
    batch.write("good", "bad", "odd")
    refusal = {"error": {"message": "no", "code": 400}}
    endpoint.script = lambda prompt, _: {
        "good": Answer(body={"text": "yes"}, headers={"X-Request-Id": "cmpl-1"}),
        "bad": Answer(400, refusal),
        "odd": Answer(200, b"<html>"),
    }[prompt]
    code, said = batch.run()
    assert code == 1
    assert "1 answers in " in said
    assert "2 errors in " in said
    assert batch.answers()["good"]["response"] == {
        "status_code": 200,
        "request_id": "cmpl-1",
        "body": {"text": "yes"},
    }
    assert batch.errors()["bad"]["response"]["body"] == refusal
    assert batch.errors()["odd"]["error"]["code"] == "invalid_answer"
    sent = {headers["X-Request-Id"] for headers in endpoint.headers}
    assert sent == {line["id"] for line in (*batch.answers().values(), *batch.errors().values())}


def test_no_more_run_at_once_than_allowed(batch: Batch, endpoint: Endpoint) -> None:
    """And as many do."""
    batch.write(*map(str, range(12)))
    gate = threading.Event()
    endpoint.script = lambda *_: Answer(hold=gate)
    process = batch.begin("--concurrency", "4")
    wait_for("four are asked", lambda: endpoint.running == 4)
    gate.set()
    code, _ = batch.end(process)
    assert code == 0
    assert endpoint.most_running == 4
    assert len(batch.answers()) == 12


def test_a_killed_run_is_gone_on_with(batch: Batch, endpoint: Endpoint) -> None:
    """SIGKILL in the middle: what was written is not asked again, everything is answered once."""
    batch.write(*map(str, range(8)))
    never = threading.Event()
    endpoint.script = lambda prompt, _: Answer(hold=never if int(prompt) >= 5 else None)
    process = batch.begin("--concurrency", "2")
    wait_for("five are written", lambda: len(batch.answers()) == 5)
    process.kill()
    batch.end(process)
    never.set()
    with (batch.folder / "r.output.jsonl").open("a") as file:
        file.write('{"id": "batch_req_x", "custom_id": "5", "resp')
    code, said = batch.run()
    assert code == 0
    assert "5 of 8 requests are done already" in said
    assert batch.answers().keys() == set(map(str, range(8)))
    assert all(len(endpoint.times(str(number))) == 1 for number in range(5))


def test_an_interrupt_lets_running_requests_end(batch: Batch, endpoint: Endpoint) -> None:
    """They are written down, nothing new begins, and the same command does the rest."""
    batch.write(*map(str, range(6)))
    gate = threading.Event()
    endpoint.script = lambda *_: Answer(hold=gate)
    process = batch.begin("--concurrency", "2")
    wait_for("two are asked", lambda: endpoint.running == 2)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "Stopping when the running requests have ended" in process.stderr.readline()
    gate.set()
    code, said = batch.end(process)
    assert code == 130
    assert "the same command goes on from here" in said
    assert len(endpoint.asked) == len(batch.answers()) == 2
    assert batch.run()[0] == 0
    assert len(endpoint.asked) == len(batch.answers()) == 6


def test_a_second_interrupt_stops_at_once(batch: Batch, endpoint: Endpoint) -> None:
    """What runs is given up, and not written down as failed."""
    batch.write("a")
    gate = threading.Event()
    endpoint.script = lambda *_: Answer(hold=gate)
    process = batch.begin()
    wait_for("it is asked", lambda: endpoint.running)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    code, _ = batch.end(process)
    gate.set()
    assert code == 130
    assert not batch.answers()
    assert not batch.errors()


def test_retry_after_is_waited_for(batch: Batch, endpoint: Endpoint) -> None:
    """A refusal that may pass is no failure; the endpoint says when to come back."""
    batch.write("a")
    endpoint.script = lambda _, times: (
        Answer(429, {"error": {}}, {"Retry-After": "1"}) if times == 1 else Answer(body={"n": times})
    )
    assert batch.run()[0] == 0
    first, second = endpoint.times("a")
    assert 1.0 <= second - first < 10.0
    assert batch.answers()["a"]["response"]["body"] == {"n": 2}


def test_a_broken_connection_is_tried_again(batch: Batch, endpoint: Endpoint) -> None:
    """The endpoint may have been replaced meanwhile."""
    batch.write("a")
    endpoint.script = lambda _, times: Answer(body=times, hang_up=times == 1)
    assert batch.run()[0] == 0
    assert len(endpoint.times("a")) == 2


def test_a_request_that_is_refused_too_often_fails_with_the_last_answer(
    batch: Batch, endpoint: Endpoint
) -> None:
    """And is asked again with --retry-failed only."""
    batch.write("a")
    busy = Answer(503, {"error": {"code": 503}}, {"Retry-After": "0"})
    endpoint.script = lambda _, times: busy if times <= 2 else Answer()
    assert batch.run("--max-tries", "2")[0] == 1
    assert batch.errors()["a"]["response"]["status_code"] == 503
    assert batch.run("--max-tries", "2")[0] == 1
    assert len(endpoint.times("a")) == 2
    assert batch.run("--retry-failed")[0] == 0
    assert batch.answers().keys() == {"a"}
    assert not batch.errors()


def test_the_key_is_the_environments(batch: Batch, endpoint: Endpoint) -> None:
    """Under the name that OpenAI's clients read; on the command line others could see it."""
    batch.write("a")
    batch.environment = {"OPENAI_API_KEY": "sk-mine"}
    assert batch.run()[0] == 0
    assert endpoint.headers[0]["Authorization"] == "Bearer sk-mine"


def test_a_refused_key_ends_the_run(batch: Batch, endpoint: Endpoint) -> None:
    """All requests would fail for a reason that is not theirs: none is written down as failed."""
    batch.write("a", "b")
    endpoint.script = lambda *_: Answer(401, {"error": {}})
    code, said = batch.run("--concurrency", "1")
    assert code == 2
    assert "answers 401 to this key; set OPENAI_API_KEY or give --key-file" in said
    assert len(endpoint.asked) == 1
    assert not batch.errors()


def test_nobody_there_ends_the_run(batch: Batch) -> None:
    """The same: exit code 1 and one line, and nothing is written down."""
    batch.write("a")
    with socket.create_server(("127.0.0.1", 0)) as free:
        batch.url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, said = batch.run("--max-tries", "1")
    assert code == 1
    assert f"lockstep batch: no answer from {batch.url}" in said
    assert not batch.errors()


def test_a_bad_file_is_refused_before_anything_is_asked(batch: Batch, endpoint: Endpoint) -> None:
    """Exit code 2, the line named, no output file made."""
    batch.write("a", "a")
    code, said = batch.run()
    assert code == 2
    assert "line 2: custom_id: 'a' is line 1's too" in said
    assert not endpoint.asked
    assert not (batch.folder / "r.output.jsonl").exists()


def test_output_onto_the_input_is_refused(batch: Batch) -> None:
    """However its path is written."""
    batch.write("a")
    before = (batch.folder / "r.jsonl").read_bytes()
    same = Path(batch.folder, "..", batch.folder.name, "r.jsonl")
    code, said = batch.run("--output", str(same))
    assert code == 2
    assert "are not three files" in said
    assert (batch.folder / "r.jsonl").read_bytes() == before
