"""The comparison of steps with and without a page: both do the same work."""

from benchmarks.host import inspector_cost
from benchmarks.host.inspector_cost import Page, make_core, measure, report


def test_page_asks_while_steps_are_measured(monkeypatch):
    monkeypatch.setattr(inspector_cost, "NUM_BLOCKS", 10_000)
    plain, inspected = make_core(4, 40, 0.0), make_core(4, 40, 0.0)
    page = Page(inspected)
    page.ask_when_due(0.0)
    assert measure(plain, 20, None, 0.0) > 0
    assert measure(inspected, 20, page, 1.0) > 0
    stats, inspected_stats = plain.make_stats(), inspected.make_stats()
    assert stats.num_scheduled_tokens == inspected_stats.num_scheduled_tokens == 4 * 40 + 4 * 22


def test_share_is_of_the_step_with_its_device():
    line = report("case", [100.0] * 4, [120.0] * 4, 0.0019)
    assert line.split()[-2] == "+1.00"
