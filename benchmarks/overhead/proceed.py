"""Process with an ext_proc server that changes nothing, to show what any such server costs."""

import asyncio
import os
import signal
import sys

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.proxy.messages import proceed
from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest
from extproc.proxy.service import SERVICE


async def process(_: object, context: grpc.aio.ServicerContext) -> None:
    """Answers each message with CONTINUE; ignores cancellation, as ``extproc/proxy/service.py``."""
    await asyncio.shield(_answer(context))


async def _answer(context: grpc.aio.ServicerContext) -> None:
    while (raw := await context.read()) is not grpc.aio.EOF:
        phase = ProcessingRequest.FromString(raw).WhichOneof("request")
        await context.write(proceed(phase or ""))


async def serve(port: int) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", 2**31 - 1)])
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    handler = grpc.stream_stream_rpc_method_handler(process)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    await ended.wait()
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
