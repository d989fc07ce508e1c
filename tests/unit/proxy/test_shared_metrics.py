"""Whichever process of `--workers N` is scraped, it answers for all of them."""

from dataclasses import dataclass
from pathlib import Path

from proxy.metrics import ProxyMetrics
from proxy.shared_metrics import SharedMetrics, file_of, set_aside


@dataclass
class Worker:
    metrics: ProxyMetrics
    shared: SharedMetrics

    def scrape(self) -> dict[str, float]:
        lines = self.metrics.expose(self.shared.others()).decode().splitlines()
        parts = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in parts}


def worker(folder: Path, number: int, *, num_done: int, num_running: int, num_routable: int) -> Worker:
    metrics = ProxyMetrics()
    metrics.watch("pd_requests_running", "x", lambda: num_running)
    metrics.watch("pd_routable", "x", lambda: num_routable, min)
    for _ in range(num_done):
        metrics.requests.inc("/v1/completions", "done")
        metrics.observe_ttft("free", 0.25, {"prefill": 0.2})
    shared = SharedMetrics(file_of(folder, number), metrics)
    shared.write()
    return Worker(metrics, shared)


def test_every_process_tells_the_sums_of_all(tmp_path: Path) -> None:
    workers = [worker(tmp_path, n, num_done=n + 1, num_running=n, num_routable=3 - n) for n in range(3)]
    for each in workers:
        told = each.scrape()
        assert told['pd_proxy_requests_total{outcome="done",path="/v1/completions"}'] == 6
        assert told['pd_ttft_seconds_count{kind="free"}'] == 6
        assert told['pd_ttft_seconds_sum{kind="free"}'] == 1.5
        assert told['pd_ttft_stage_seconds_count{kind="free",stage="prefill"}'] == 6
        assert (told["pd_requests_running"], told["pd_routable"]) == (3, 1)


def test_what_a_lost_process_counted_stays_and_what_it_held_does_not(tmp_path: Path) -> None:
    worker(tmp_path, 0, num_done=5, num_running=2, num_routable=0)
    left = worker(tmp_path, 1, num_done=1, num_running=1, num_routable=2)
    set_aside(tmp_path, 0)
    set_aside(tmp_path, 0)  # a worker lost before it counted anything
    again = worker(tmp_path, 0, num_done=0, num_running=0, num_routable=2)
    for each in (left, again):
        told = each.scrape()
        assert told['pd_proxy_requests_total{outcome="done",path="/v1/completions"}'] == 6
        assert (told["pd_requests_running"], told["pd_routable"]) == (1, 2)


def test_what_was_told_outlives_the_process_that_told_it(tmp_path: Path) -> None:
    one = worker(tmp_path, 0, num_done=2, num_running=0, num_routable=1)
    other = worker(tmp_path, 1, num_done=0, num_running=0, num_routable=1)
    one.metrics.requests.inc("/v1/completions", "done")
    told = one.scrape()
    set_aside(tmp_path, 0)  # killed before its next turn to write
    name = 'pd_proxy_requests_total{outcome="done",path="/v1/completions"}'
    assert other.scrape()[name] == told[name] == 3


def test_scraping_changes_nothing(tmp_path: Path) -> None:
    one = worker(tmp_path, 0, num_done=2, num_running=0, num_routable=1)
    worker(tmp_path, 1, num_done=3, num_running=0, num_routable=1)
    assert one.scrape() == one.scrape()
