"""A soak tells what was lost, mixed up, left behind or grown."""

import asyncio
import dataclasses
from pathlib import Path

from benchmarks.serve import soak as soak_module
from benchmarks.serve.soak import HELD, SoakResult, SoakSize, make_parser, report, result_rows
from benchmarks.serve.soak_requests import make_requests
from tests.benchmarks.serve.fake_completions_server import running_fake_server

SIZE = SoakSize(num_streams=8, duration_s=2.0, num_burst_requests=25, burst_size=10)


class GrowingServer:
    """Answers "aaaa"; the engine's memory grows by a tenth from sample to sample."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_samples = 0
        self._num_looks = 0

    def resident_bytes(self) -> dict[str, int]:
        self.num_samples += 1
        return {"server": 10**6, "engine": int(10**6 * 1.1**self.num_samples)}

    def perf_counter(self) -> float:
        """A clock that goes on with what is done: a soak of 2 seconds takes 30 samples or so."""
        self._num_looks += 1
        return 0.05 * self.num_samples + 0.001 * self._num_looks


_send_bursts = soak_module._send_bursts


def run_soak(monkeypatch, *, num_wrong: int, held: float) -> SoakResult:
    """Over five different requests, of which some are to get another answer than they do."""
    monkeypatch.setattr(soak_module, "_SAMPLE_EVERY_S", 0.02)
    monkeypatch.setattr(soak_module, "_IDLE_WITHIN_S", 0.01)
    requests = [
        dataclasses.replace(request, max_tokens=4, answer="aaab" if i < num_wrong else "aaaa")
        for i, request in enumerate(make_requests(5, seed=0))
    ]
    with running_fake_server(gap_s=0.02, is_chunked=True) as fake:
        fake.metrics = "".join(f'{name}{{engine="0"}} {held}\n' for name in HELD)
        server = GrowingServer(fake.url.removesuffix("/v1"))
        monkeypatch.setattr(soak_module, "time", server)

        def send_bursts(*arguments):
            # All of a burst run before one is answered.
            fake.most_running, fake.num_awaited = 0, SIZE.burst_size
            return _send_bursts(*arguments)

        monkeypatch.setattr(soak_module, "_send_bursts", send_bursts)
        result = asyncio.run(soak_module.soak(server, requests, SIZE))
        assert fake.most_running == SIZE.burst_size
    assert result.figures["bursts_num_requests"] == SIZE.num_burst_requests
    assert result.figures["streams_num_requests"] > SIZE.num_streams
    assert result.figures["streams_itl_ms_p99"] > 0
    assert result.figures["streams_requests_at_once"] == 2 * held
    assert result.figures["server_growth_percent"] == 0
    assert result.figures["engine_growth_percent"] > 10
    return result


def test_wrong_answers_and_blocks_that_are_held_are_told(monkeypatch) -> None:
    result = run_soak(monkeypatch, num_wrong=1, held=0.25)
    num_all = result.figures["streams_num_requests"] + SIZE.num_burst_requests
    # One in five is wrong, and clients begin at different ones.
    assert 0.1 < len(result.differing) / num_all < 0.3
    assert all(request.answer == "aaab" and got == "aaaa" for request, got in result.differing)
    told = "\n".join(result.broken_promises)
    assert "answers are not those of LLM.generate" in told
    assert "vllm:kv_cache_usage_perc is 0.25 at the end" in told
    assert "wanted: 'aaab'" in report(result)


def test_failed_requests_break_a_promise_and_are_in_the_rows() -> None:
    held = dict.fromkeys(HELD, 0.0)
    result = SoakResult(figures={}, errors={"ReadError": 2}, differing=[], held=held)
    assert result.broken_promises == ["2 x ReadError"]
    arguments = make_parser().parse_args(["--out", "x", "--", "--max-num-seqs", "8"])
    assert arguments.out == Path("x")
    rows = {row.metric: row for row in result_rows(arguments, result)}
    assert list(rows["failed_requests"].values) == [2]
    assert rows["failed_requests"].case.endswith("--max-num-seqs 8")
