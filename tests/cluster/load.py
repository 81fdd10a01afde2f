"""Open-loop load from inside the cluster: prints each request as a line of JSON when it ends."""

import asyncio
import json
import os
import random
import sys
import time
import uuid

import aiohttp

_WORDS = ["router", "request", "replica", "prefill", "decode", "queue", "batch", "token"]


async def _ask(session: aiohttp.ClientSession, url: str, tokens: int) -> None:
    request, began_s = str(uuid.uuid4()), time.time()
    text = " ".join(random.choices(_WORDS, k=random.randint(20, 200)))
    body = {
        "model": os.environ["MODEL"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": random.random() < 0.5,
    }
    status, error = 0, ""
    try:
        async with session.post(url, json=body, headers={"x-request-id": request}) as response:
            status = response.status
            answer = await response.read()
            if body["stream"] and status == 200 and not answer.rstrip().endswith(b"[DONE]"):
                error = "stream without its end"
    except (aiohttp.ClientError, TimeoutError) as raised:
        error = repr(raised)
    line = {"id": request, "at": began_s, "status": status, "error": error}
    print(json.dumps(line | {"seconds": round(time.time() - began_s, 2)}), flush=True)


async def _run(url: str, rate: float) -> None:
    timeout = aiohttp.ClientTimeout(total=120)
    tasks = set[asyncio.Task[None]]()
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            tasks.add(task := asyncio.create_task(_ask(session, url, random.randint(20, 150))))
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(random.expovariate(rate))


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], float(sys.argv[2])))
