"""The soak test reports wrong answers, failed requests, held blocks and growing memory."""

import asyncio
import dataclasses

from benchmarks.serve import soak as soak_module
from benchmarks.serve.soak import HELD, SoakSize, make_parser, report, result_rows
from benchmarks.serve.soak_requests import make_requests
from tests.benchmarks.serve.fake_server import FakeServer

SIZE = SoakSize(num_streams=8, duration_s=1.0, num_burst_requests=25, burst_size=10)


class GrowingServer:
    """The engine's memory grows by a tenth from sample to sample."""

    url, _num_samples = "http://fake", 0

    def resident_bytes(self) -> dict[str, int]:
        self._num_samples += 1
        return {"server": 10**6, "engine": int(10**6 * 1.1**self._num_samples)}


def test_failures_are_reported_and_counted(monkeypatch) -> None:
    monkeypatch.setattr(soak_module, "_SAMPLE_EVERY_S", 0.02)
    monkeypatch.setattr(soak_module, "_IDLE_WITHIN_S", 0.01)
    # One in five requests expects another answer than the server gives.
    requests = [
        dataclasses.replace(request, max_tokens=4, answer="aaab" if i == 0 else "aaaa")
        for i, request in enumerate(make_requests(5, seed=0))
    ]
    metrics = "".join(f'{name}{{engine="0"}} 0.25\n' for name in HELD)
    fake = FakeServer(monkeypatch, gap_s=0.02, metrics=metrics)
    result = asyncio.run(soak_module.soak(GrowingServer(), requests, SIZE))
    assert fake.most_running >= SIZE.burst_size
    figures = result.figures
    assert figures["bursts_num_requests"] == SIZE.num_burst_requests
    assert figures["streams_requests_at_once"] == 2 * 0.25
    assert figures["server_growth_percent"] == 0 and figures["engine_growth_percent"] > 10
    num_all = figures["streams_num_requests"] + SIZE.num_burst_requests
    assert 0.1 < len(result.differing) / num_all < 0.3
    assert all(request.answer == "aaab" and got == "aaaa" for request, got in result.differing)
    result = dataclasses.replace(result, errors={"ReadError": 2})
    broken = "\n".join(result.failures)
    for words in ("2 x ReadError", "differ from LLM.generate", "kv_cache_usage_perc is 0.25"):
        assert words in broken
    assert "engine_growth_percent" in broken and "server_growth_percent" not in broken
    assert "wanted: 'aaab'" in report(result)
    rows = {row.metric: row.values for row in result_rows(make_parser().parse_args([]), result)}
    assert rows["failed_requests"] == [2] and rows["answers_that_differ"] == [len(result.differing)]
