"""What to try while the demo runs: commands that work as printed."""

import json
import shlex

from extproc.lab.harness.stack import MODEL, Stack
from extproc.lab.harness.traffic import POLICY_HEADER


def instructions(stack: Stack) -> str:
    """Shell commands for another terminal, with a word on each."""
    return f"""
To try by hand, in another terminal. A chat; a streamed one; one routed by another policy:

{_chat(stack)}
{_chat(stack, stream=True)}
{_chat(stack, policy="round_robin")}

In a browser, {stack.router_admin}/ shows fleet, decisions and warnings, live.

The last decisions, and why (add the id of a request to see all that was compared for it):

  {stack.explain_command}

The same as JSON; the router's view of the fleet; Envoy's view:

  curl -s '{stack.router_admin}/decisions?after=0'
  curl -s {stack.router_admin}/fleet
  curl -s {stack.envoy_admin}/clusters

Kill the router and see Envoy's fallback serve; start it again, and routing resumes:

  kill -9 {stack.process("router").pid}
  {stack.router_command}

Gentle traffic goes on until Ctrl-C."""


def _chat(stack: Stack, stream: bool = False, policy: str = "") -> str:
    body: dict[str, object] = {"model": MODEL}
    if stream:
        body["stream"] = True
    body["messages"] = [{"role": "user", "content": "Hello!"}]
    words = [f"curl -sN {stack.url}/v1/chat/completions -H 'content-type: application/json'"]
    if policy:
        words.append(f"-H {shlex.quote(f'{POLICY_HEADER}: {policy}')}")
    words.append(f"-d {shlex.quote(json.dumps(body, separators=(',', ':')))}")
    return "  " + " \\\n    ".join(words)
