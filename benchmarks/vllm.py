"""Real vLLM servers, each on its own CPU core."""

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from extproc.lab.harness.processes import Process, answers, flags, pick_ports, together
from extproc.predict.step import StepModel

MODEL = "model"  # name of the model on the servers
_MAX_MODEL_LEN = 4096
_KV_BLOCKS = 256  # of 128 tokens on a CPU: room for a full batch
_START_S = 300.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class VllmServer:
    address: str  # `ip:port`
    pid: int


@asynccontextmanager
async def vllm_servers(
    models: Sequence[Path],
    max_num_seqs: Sequence[int],
    directory: Path,
    options: Sequence[Sequence[str]] = (),
) -> AsyncIterator[dict[str, VllmServer]]:
    """Runs a server for each model on a core of its own; yields the servers by name."""
    names = [f"vllm-{number}" for number in range(1, len(models) + 1)]
    ports = pick_ports(dict.fromkeys(names, 0))

    def start(core: int, name: str) -> Awaitable[Process]:
        argv, env = vllm_command(models[core], ports[name], core, max_num_seqs[core])
        argv += options[core] if options else ()
        ready, log = answers(f"http://127.0.0.1:{ports[name]}/health"), directory / f"{name}.log"
        return Process.start(name, argv, log=log, ready=ready, ready_s=_START_S, env=env)

    starting = {name: start(core, name) for core, name in enumerate(names)}
    async with together(starting, _STOP_S) as started:
        yield {
            name: VllmServer(f"127.0.0.1:{ports[name]}", process.pid)
            for name, process in started.items()
        }


def vllm_command(
    model: Path, port: int, core: int, max_num_seqs: int
) -> tuple[list[str], dict[str, str]]:
    options = {
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": _MAX_MODEL_LEN,
        "max-num-seqs": max_num_seqs,
        "num-gpu-blocks-override": _KV_BLOCKS,
        "dtype": "float32",  # bfloat16 is 30 times slower on processors without it
    }
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
    }
    return ["vllm", "serve", str(model), *flags(options), "--enforce-eager"], env


def described(step: StepModel) -> str:
    return (
        f"{step.c0 * 1e3:.1f} ms a step, {step.c_prefill * 1e6:.0f} µs a prompt token, "
        f"{step.c_att * 1e6:.2f} µs for each before it, {step.c_batch * 1e6:.0f} µs a sequence, "
        f"{step.c_kv * 1e6:.2f} µs a KV token; {step.frontend * 1e3:.1f} ms before the engine"
    )
