"""/metrics answers in OpenMetrics if the Accept header asks for it, else in the text format."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.request_output import TokenTotals
from paxkv.server.metrics.metrics_format import choose_format
from paxkv.server.metrics.server_metrics import ServerMetrics

# What Prometheus 3 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,*/*;q=0.1"
)


def scrape(accept):
    encode, content_type = choose_format(accept)
    metrics = ServerMetrics("m", cache_settings={"block_size": "16"})
    return metrics.render(SchedulerStats(), TokenTotals(), encode=encode).decode(), content_type


def sample_names(families):
    names = {sample.name for family in families for sample in family.samples}
    return {name for name in names if not name.endswith("_created")}


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text", "Application/OpenMetrics-Text; q=0.5", PROMETHEUS]
)
def test_openmetrics_has_the_same_names(accept):
    text, content_type = scrape(accept)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert text.endswith("# EOF\n")
    # `read_openmetrics` raises if the text is not valid OpenMetrics.
    names = sample_names(read_openmetrics(text))
    assert names == sample_names(read_text(scrape("")[0]))
    assert {"vllm:num_requests_running", "vllm:iteration_tokens_total_bucket"} <= names


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/plain", "text/html", "application/openmetrics-text;q=0, */*"]
)
def test_others_get_the_text_format(accept):
    text, content_type = scrape(accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert "# EOF" not in text
