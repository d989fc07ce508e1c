"""Numbers out of `/metrics`, over a real port."""

import asyncio

from aiohttp import web

from benchmarks import scrape

TEXT = """\
# TYPE pd_kv_pull_bytes counter
pd_kv_pull_bytes_total{kind="a"} 3.0
pd_kv_pull_bytes_total{kind="b"} 4.0
# TYPE lag_seconds histogram
lag_seconds_bucket{le="0.01"} 5.0
lag_seconds_bucket{le="+Inf"} 6.0
lag_seconds_sum 0.25
lag_seconds_count 6.0
"""


async def test_samples_are_summed_over_labels_or_told_apart_by_one() -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=TEXT)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        assert await asyncio.to_thread(scrape.total, base, "pd_kv_pull_bytes_total") == 7.0
        assert await asyncio.to_thread(scrape.total, base, "lag_seconds_sum", "lag_seconds_count") == 6.25
        assert await asyncio.to_thread(scrape.total, base, "nothing") == 0.0
        groups = (("pd_kv_pull_bytes_total",), ("lag_seconds_sum", "lag_seconds_count"), ())
        assert await asyncio.to_thread(scrape.totals, base, *groups) == [7.0, 6.25, 0.0]
        by_bound = await asyncio.to_thread(scrape.by_label, base, "lag_seconds_bucket", "le")
        assert list(by_bound.items()) == [("0.01", 5.0), ("+Inf", 6.0)]
    finally:
        await runner.cleanup()
