import asyncio
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.errors import ConfigError, StartupError
from proxy.up.main import main
from proxy.up.plan import ChildPlan, plan_children
from proxy.up.trio import ChildDied, is_ready, running_trio
from tests.support.trio import ROOT, free_port

SERVER = """
import http.server, signal, sys
name, port, exits = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("my last words", flush=True)
            import os; os._exit(3)
        self.send_response(200 if self.path == "/ready" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
def stop(*_):
    print(f"{name} stops", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print(f"{name} starts", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server(name: str) -> ChildPlan:
    port = free_port()
    command = (sys.executable, "-c", SERVER, name, str(port))
    return ChildPlan(name=name, command=command, url=f"http://127.0.0.1:{port}")


def failing(name: str, code: int) -> ChildPlan:
    command = (sys.executable, "-c", f"print('no such model'); raise SystemExit({code})")
    return ChildPlan(name=name, command=command, url=f"http://127.0.0.1:{free_port()}")


async def test_all_are_up_when_the_last_is_ready_and_stop_in_reverse_order():
    lines: list[str] = []
    plans = [server("decode"), server("prefill"), server("proxy")]
    async with running_trio(plans, lines.append, SystemClock()) as trio:
        assert all(is_ready(plan.url) for plan in plans)
        assert trio.url("proxy") == plans[2].url
        assert sum("is ready after" in line for line in lines) == 3
    said = [line for line in lines if line.endswith("stops")]
    assert said == ["  proxy | proxy stops", "prefill | prefill stops", " decode | decode stops"]
    assert not any(is_ready(plan.url) for plan in plans)


@pytest.mark.parametrize(("code", "ours"), [(1, 1), (2, 2), (3, 1)])
async def test_a_process_that_cannot_start_ends_all_and_says_why(code: int, ours: int):
    lines: list[str] = []
    plans = [server("decode"), failing("prefill", code)]
    with pytest.raises(ChildDied, match=f"prefill ended with status {code}: no such model") as caught:
        async with running_trio(plans, lines.append, SystemClock()):
            pass
    assert caught.value.exit_code == ours
    assert not is_ready(plans[0].url)


async def test_a_process_that_dies_later_is_noticed_with_its_last_words():
    plans = [server("decode"), server("prefill")]
    async with AsyncExitStack() as stack:
        trio = await stack.enter_async_context(running_trio(plans, lambda _: None, SystemClock()))
        await asyncio.to_thread(is_ready, plans[1].url + "/die?")
        await asyncio.to_thread(_get, plans[1].url + "/die")
        death = await trio.wait_death()
    assert "prefill ended with status 3: my last words" in str(death)


def _get(url: str) -> None:
    subprocess.run(
        [sys.executable, "-c", f"import urllib.request as u\ntry: u.urlopen({url!r})\nexcept OSError: pass"],
        check=False,
        capture_output=True,
    )


async def test_a_program_that_is_not_there_is_a_startup_error():
    plan = ChildPlan(name="decode", command=("/no/such/program",), url="http://127.0.0.1:1")
    with pytest.raises(StartupError, match="decode cannot be started"):
        async with running_trio([plan], lambda _: None, SystemClock()):
            pass


def test_addresses_come_from_the_config(tmp_path: Path):
    file = tmp_path / "pd.yaml"
    file.write_text("engine: {model: m}\nprefill: {port: 7, lease_ttl_s: 3}\nproxy: {host: 0.0.0.0}\n")
    plans = plan_children(str(file))
    assert [(plan.name, plan.url) for plan in plans] == [
        ("decode", "http://127.0.0.1:8200"),
        ("prefill", "http://127.0.0.1:7"),
        ("proxy", "http://127.0.0.1:8000"),
    ]
    assert plans[0].command[1:] == ("-m", "decode", "--config", str(file))


def test_a_wrong_config_is_exit_2_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "pd.yaml"
    file.write_text("proxi: {}\n")
    with pytest.raises(ConfigError):
        plan_children(str(file))
    assert main(["--config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "proxi" in line


def test_the_command_says_which_process_could_not_start_and_exits_with_its_status(tmp_path: Path):
    file = tmp_path / "pd.yaml"
    file.write_text("engine: {model: nothing.gguf}\nproxy: {fleet: {decode: [ftp://nowhere]}}\n")
    program = "import sys; from proxy.up.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "--config", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "ftp://nowhere" in ended.stderr.strip().splitlines()[-1]


def test_ctrl_c_while_starting_stops_everything(tmp_path: Path):
    ports = [free_port() for _ in range(3)]
    file = tmp_path / "pd.yaml"
    model = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_text(
        f"engine: {{model: {model}}}\nprefill: {{port: {ports[0]}}}\ndecode: {{port: {ports[1]}}}\n"
        f"proxy: {{port: {ports[2]}, fleet: {{decode: ['http://127.0.0.1:{ports[1]}']}}}}\n"
    )
    program = "import sys; from proxy.up.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--config", str(file)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "starting proxy" in line:
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert "SIGINT: stopping" in rest


@pytest.mark.parametrize("role", ["prefill", "decode", "proxy"])
def test_processes_that_would_answer_over_tls_only_are_refused_by_name(tmp_path: Path, role: str) -> None:
    file = tmp_path / "pd.yaml"
    file.write_text(f"engine: {{model: m.gguf}}\n{role}: {{tls: {{cert_file: c.pem}}}}\n")
    with pytest.raises(ConfigError, match=f"{role}.tls.*one by one"):
        plan_children(str(file))
