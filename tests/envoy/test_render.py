from pathlib import Path

import yaml

from extproc.lab.harness.envoy_config import TEMPLATE, addressed


def test_users_and_demo_have_one_file() -> None:
    own = Path(__file__).parents[2] / "envoy" / "envoy.yaml"
    assert TEMPLATE.read_text(encoding="utf-8") == own.read_text(encoding="utf-8")


def test_only_addresses_differ_from_the_template() -> None:
    rendered = addressed(
        listen="127.0.0.1:1",
        admin="127.0.0.1:2",
        routers=["127.0.0.1:3", "127.0.0.1:4"],
        replicas=["10.0.0.1:5", "h:6"],
    )
    original = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    addresses = []
    for tree in (original, rendered):
        resources = tree["static_resources"]
        addresses.append(
            [
                tree["admin"].pop("address"),
                resources["listeners"][0].pop("address"),
                *(
                    [one["endpoint"]["address"] for one in group["lb_endpoints"]]
                    for cluster in resources["clusters"]
                    for group in cluster["load_assignment"].pop("endpoints")
                ),
            ]
        )
    assert rendered == original

    def at(host: str, port: int) -> dict[str, dict[str, object]]:
        return {"socket_address": {"address": host, "port_value": port}}

    assert addresses[1] == [
        at("127.0.0.1", 2),
        at("127.0.0.1", 1),
        [at("127.0.0.1", 3), at("127.0.0.1", 4)],
        [at("10.0.0.1", 5), at("h", 6)],
    ]
