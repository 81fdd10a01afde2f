"""Settings from file, environment and flags, and the error for each mistake."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from extproc import settings
from extproc.cli.configuration import add_file, add_flags, configured
from extproc.config import REMOVED, Config, PolicyName
from extproc.route.policies import POLICIES
from extproc.settings import ConfigError, load
from extproc.share.connection import address, connect
from tests.certificates import Authority, openssl

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "extproc.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(
    flags: dict[str, str] | None = None, env: dict[str, str] | None = None, file: Path | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(flags or {}, env or {}, file)
    return [*caught.value.args]


@pytest.mark.parametrize("key", REMOVED)
def test_removed_setting_names_its_replacement(key: str) -> None:
    assert problems({key: "1"}) == [f"--{key}: {key!r} was removed: {REMOVED[key]}"]


FOR_EXTPROC = {
    "EXTPROC_SERVICE_HOST": "10.0.0.1",
    "EXTPROC_PORT": "tcp://10.0.0.1:50051",
    "EXTPROC_PORT_50051_TCP_ADDR": "10.0.0.1",
}
"""Variables that Kubernetes sets for a Service named extproc."""


@pytest.mark.parametrize(
    ("flags", "env", "text", "loaded"),
    [
        ({}, {}, "# nothing", {}),
        ({}, {}, "poll:\n  # interval_s: 1\n", {}),  # all keys of a section are commented out
        ({"poll.interval_s": "0.3"},
         {"EXTPROC_POLL__INTERVAL_S": "0.2", "EXTPROC_POLL__TIMEOUT_S": "1.5"},
         "poll: {interval_s: 0.1, timeout_s: 1, admin: 'a:1'}",
         {"poll": {"interval_s": 0.3, "timeout_s": 1.5, "admin": "a:1"}}),
        ({}, {"EXTPROC_POOL": "123"}, "", {"pool": "123"}),
        ({}, {"EXTPROC_ROUTE__SEED": ""}, "", {}),
        ({}, FOR_EXTPROC, "", {}),
        ({"request.tokenizers": "{llama: /tokenizer.json}"}, {}, "",
         {"request": {"tokenizers": {"llama": Path("/tokenizer.json")}}}),
        ({"serve.listen": "[::]:50051"}, {"EXTPROC_POLL__ADMIN": "[::1]:9089"}, "",
         {"serve": {"listen": "[::]:50051"}, "poll": {"admin": "[::1]:9089"}}),
        *(({}, {"EXTPROC_REPLICAS": text}, "", {"replicas": [{"url": "a:1"}, {"url": "b:2"}]})
          for text in ("a:1, b:2", '["a:1", "b:2"]', "[{url: a:1}, {url: 'b:2'}]")),
        *(({"replicas": text}, {}, "",
           {"replicas": [{"url": "[fd00::1]:8000"}, {"url": "[fd00::2]:8000"}]})
          for text in ("[fd00::1]:8000, [fd00::2]:8000", '["[fd00::1]:8000", "[fd00::2]:8000"]')),
        ({"route.models": "{a: b, l: [x, y], l2: [l2, x], c: {l: 95, a-next: 5}, d: l}"}, {}, "",
         {"route": {"models": {"a": {"b": 1.0}, "l": ["x", "y"], "l2": ["l2", "x"],
                               "c": {"l": 95.0, "a-next": 5.0}, "d": {"l": 1.0}}}}),
    ],
)  # fmt: skip
def test_flags_win_over_environment_and_environment_over_file(
    flags: dict[str, str], env: dict[str, str], text: str, loaded: dict[str, Any], write: Write
) -> None:
    assert load(flags, env, write(text)) == Config.model_validate(loaded)


@pytest.mark.parametrize(("named", "flag"), [("{file}", []), ("/not.yaml", ["--config", "{file}"])])
def test_environment_names_the_file_unless_a_flag_does(
    write: Write, monkeypatch: pytest.MonkeyPatch, named: str, flag: list[str]
) -> None:
    file = write("pool: from-file")
    monkeypatch.setenv("EXTPROC_CONFIG", named.format(file=file))
    parser = argparse.ArgumentParser()
    add_file(parser)
    args = parser.parse_args([word.format(file=file) for word in flag])
    assert configured(args).pool == "from-file"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("poll.intervall_s", "poll.interval_s"), ("servee.listen", "serve.listen"), ("pol", "pool")],
)
def test_unknown_key_is_named_with_source_and_nearest_key(
    write: Write, key: str, nearest: str
) -> None:
    section, _, name = key.rpartition(".")
    file = write(f"{section}: {{{name}: 1}}" if section else f"{name}: 1")
    variable = f"EXTPROC_{key.replace('.', '__').upper()}"
    hint = f"unknown key {key!r}; did you mean {nearest!r}?"
    assert problems(file=file) == [f"{file}: {hint}"]
    assert problems(env={variable: "1"}) == [f"variable {variable}: {hint}"]
    assert problems(flags={key: "1"}) == [f"--{key}: {hint}"]


def test_wrong_value_is_one_line_with_source_key_and_value(write: Write) -> None:
    file = write("poll: {interval_s: soon}\nlog: {level: loud}")
    found = problems({"serve.listen": "nowhere"}, {"EXTPROC_POLL__TIMEOUT_S": "-2"}, file)
    assert len(found) == 4
    for parts in [
        (f"{file}: log.level: ", "'loud'", "'debug'"),
        (f"{file}: poll.interval_s: ", "'soon'", "valid number"),
        ("--serve.listen: ", "'nowhere'", "host:port"),
        ("variable EXTPROC_POLL__TIMEOUT_S: poll.timeout_s: ", "'-2'", "greater than 0"),
    ]:
        (problem,) = [line for line in found if line.startswith(parts[0])]
        assert all(part in problem for part in parts)
        assert "\n" not in problem


_PORTS = ("x:0", "x:99999", "x:", ":80", "x:80/p", "[x]:1", "a b:1")
NOT_ADDRESSES = ("10.0.0.1", "::1:80", "https://x:1", *_PORTS)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("zzzzz: 1", "unknown key 'zzzzz'"),
        ("poll: 3", "'poll' is a section: set its keys, for example 'poll.interval_s'"),
        ("replicas: [{url: 'a:1'}, {url: 'b:1', profil: llama-8b-h100}]",
         "unknown key 'replicas.1.profil'; did you mean 'profile'?"),
        ("replicas: {url: a:1}", "replicas: must be a list; given: {'url': 'a:1'}"),
        ("request: {tokenizers: [a]}",
         "request.tokenizers: must hold keys and values; given: ['a']"),
        ("hold: {objectives: {a: 5}}", "hold.objectives.a: must hold keys and values; given: 5"),
        ("route: {models: {a: 5}}",
         "route.models.a: must be a name, a list of names, or names with weights; given: 5"),
        ("route: {models: {a: []}}", "route.models.a.list: must not be empty; given: []"),
        ("route: {models: {a: {b: -1}}}",
         "route.models.a.weights.b: input should be greater than or equal to 0; given: -1"),
    ],
)  # fmt: skip
def test_invalid_value_is_one_line_in_words_of_yaml(text: str, problem: str, write: Write) -> None:
    file = write(text)
    assert problems(file=file) == [f"{file}: {problem}"]


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("a: [1", "", "not YAML: line 1, column 6: "),
        ("pool: 2024-13-45", "", "line 1, column 7: not a valid timestamp"),
        ("a: " + "[" * 1000, "", "nested too deeply"),
        ("a: &a {b: *a}", "", "recursive"),
        ("serve: {drain_s: 2}\nroute:\n  policy: lmetric\nserve:\n", "",
         "line 4, column 1: the key 'serve' is already there in line 1"),
        ('redis: {url: redis://h, "url": redis://g}', "",
         "column 25: the key 'url' is already there"),
        ("a: 1\n---\nb: 1", "", "must hold keys and values, not a list"),
        ("- a\n- b", "", "must hold keys and values"),
        ("just text", "", "must hold keys and values"),
        ("redis: {url: redis://:hunter2@host:6379", "", "not YAML"),
        ("poll: {interval_s: .inf}", "poll.interval_s: ", "finite number"),
        ("serve: {drain_s: .nan}", "serve.drain_s: ", "finite number"),
        ("poll: {timeout_s: 2}", "poll.timeout_s: ",
         "must be less than 5 s: a replica that answers late"),
        ("poll: {timeout_s: 1.5, interval_s: 1}", "poll.timeout_s: ",
         "must be less than 5 s: a replica that answers late"),
        ("route: {policy: complet}", "route.policy: ",
         "; given: 'complet'; did you mean 'completion'?"),
        ("serve: {listen: '[::1]:http'}", "serve.listen: ", "not an address of the form"),
        *((f"{section}: {{{name}: 'x tenant:'}}", f"{section}.{name}: ", "pattern")
          for section, name in (("route", "session_header"), ("request", "tenant_header"),
                                ("hold", "objective_header"))),
        ("pools: {default: {}}", "pools: ", "'default' is already the name of the first pool"),
        ("pools: {a b: {}}", "pools.a b", ""),
        ("pools: {batch: {replica: [a:1]}}", "unknown key 'pools.batch.replica'", ""),
        ("pools: {batch: {replicas: [a]}}", "pools.batch.replicas.0.url: ",
         "'a' is not an address"),
        ("route: {models: {a: {}}}", "route.models: ", "'a'"),
        ("route: {models: {a: {b: 0}}}", "route.models: ", "'a'"),
        ("route: {models: {a: b, b: c}}", "route.models: ", "'a' stands for 'b'"),
        ("route: {models: {a: [b, x], b: [x]}}", "route.models: ", "'a' stands for 'b'"),
        *((f"replicas: [{{url: a:1}}, {{{key}: '{url}'}}]", f"replicas.1.{key}: ", "host:port")
          for key in ("url", "dns") for url in NOT_ADDRESSES),
        *((f"replicas: [{{kubernetes: {{service: {service}}}}}]", f"replicas.0.kubernetes.{key}: ",
           reason) for service, key, reason in (
            ("'vllm:8000', port: 1", "service", "letters, digits"),
            ("vllm, port: 1, namespace: ''", "namespace", "letters"),
            ("vllm, port: 0", "port", "from 1 to 65535"),
            ("vllm, port: '65536'", "port", "from 1 to 65535"),
            ("vllm, port: 'a b'", "port", "letters, digits"))),
        *((f"replicas: [{{kubernetes: {{{pods}}}}}]", "replicas.0.kubernetes", reason)
          for pods, reason in (
            ("service: vllm", "service and port go together"),
            ("inference_pool: vllm, port: 8000", "service and port go together"),
            ("inference_pool: 'vllm/a'", "pattern"),
            ("inference_pool: vllm, service: vllm, port: 1", "one of 'service' and"),
            ("namespace: gpu", "one of 'service' and 'inference_pool'"))),
        ("replicas: [{url: a:1, dns: a:1}]", "replicas.0: ",
         "needs one of 'url', 'dns' and 'kubernetes'"),
        ("replicas: [{name: gpu-1}]", "replicas.0: ", "needs one of 'url', 'dns' and 'kubernetes'"),
        ("replicas: [{url: a:1, profile: llama-8b-h10}]", "replicas.0.profile: ",
         "did you mean 'llama-8b-h100'?"),
        ("replicas: [{url: a:1, kv_events_port: 5557}]", "replicas.0: ",
         "kv_events_port and kv_events_replay_port go together"),
        *((f"hold: {{objectives: {{{objectives}}}}}", "hold", reason) for objectives, reason in (
            ("a: {tenants: [x]}, b: {tenants: [x]}", "tenants in several objectives: x"),
            ("a: {models: [m]}, b: {models: [m]}", "models in several objectives: m"),
            ("a: {sheddable: true}", "objective 'a' is sheddable and has no target"))),
        *((f"{section}: {{{name}: a.pem}}", section, "tls_cert and tls_key")
          for section in ("serve", "eds") for name in ("tls_cert", "tls_key", "tls_client_ca")),
        *((f"redis: {{{redis}}}", "redis", reason) for redis, reason in (
            ("url: 'redis://:hunter2@/0'", "names no host"),
            ("sentinels: [a:1]", "sentinels and service go together"),
            ("service: main", "sentinels and service go together"),
            ("sentinels: [a:1], service: main, cluster: [a:1]", "not both"),
            ("cluster: [a:1], url: 'redis://:hunter2@a/2'", "only database 0"),
            ("cluster: [a:1], url: unix:///run/redis", "need a URL that begins with redis"),
            ("cluster: [a]", "host:port"),
            ("cluster: [a:0]", "a port from 1 to 65535"),
            ("sentinels: [a:0], service: main", "a port from 1 to 65535"))),
        *((f"traces: {{endpoint: '{url}'}}", "traces.endpoint: ", reason) for url, reason in (
            ("a:4318", "pattern"), ("http://:4318", "http://host:port"),
            ("http://a:0", "without port 0"), ("http://a:99999", "port out of range"),
            ("http://a:x", "port could not be cast"))),
    ],
)  # fmt: skip
def test_unusable_setting_is_one_line_without_password(
    text: str, key: str, reason: str, write: Write
) -> None:
    file = write(text)
    (problem,) = problems(file=file)
    assert problem.startswith(f"{file}: {key}")
    assert reason in problem
    assert "\n" not in problem
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    ("pods", "port", "where"),
    [
        ("service: vllm, port: 8000", 8000, "Service vllm, port 8000"),
        ("service: vllm, port: '8000'", 8000, "Service vllm, port 8000"),
        ("service: vllm, port: http", "http", "Service vllm, port http"),
        ("inference_pool: llama-3.1, namespace: gpu", None, "InferencePool gpu/llama-3.1"),
    ],
)
def test_pods_are_those_of_a_service_or_an_inference_pool(
    pods: str, port: int | str | None, where: str
) -> None:
    [replica] = load({"replicas": f"[{{kubernetes: {{{pods}}}}}]"}, {}).replicas
    assert replica.kubernetes is not None
    assert (replica.kubernetes.port, replica.where) == (port, where)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("host:6379", "write redis://"),
        ("http://host:6379", "write redis://"),
        ("redis+ring://host:6379", "set redis.sentinels and redis.service, or redis.cluster"),
        ("redis+sentinel://:hunter2@host:1/main", "set redis.sentinels and redis.service"),
        ("redis://:hunter2@host:port/0", "write redis://"),
        ("redis://:hunter2#@host:6379", "percent-encode"),
        ("redis://:hun/hunter2@host:6379", "percent-encode"),
        ("redis://:hun?hunter2@host:6379", "percent-encode"),
        ("redis://user?hunter2=1@host:6379", "unknown option"),
        ("redis://host:0", "write redis://"),
        ("redis://host:99999", "write redis://"),
        ("redis://[::1:6379", "write redis://"),
        ("redis://a:1,b:2", "write redis://"),
        ("redis://host/hunter2", "the database of Redis is a number"),
        ("redis://host?db=hunter2", "invalid value for 'db'"),
        ("redis://:hunter2@host?no_such_option=1", "unknown option"),
        ("rediss://:hunter2@host?ssl_ca_cert=x", "did you mean 'ssl_ca_certs'?"),
        ("redis://:hunter2@host?protocol=4", "takes one of 2, 3"),
        ("rediss://:hunter2@host?ssl_cert_reqs=maybe", "required, optional, none"),
        ("rediss://:hunter2@host?ssl_check_hostname=perhaps", "one of yes, true"),
        ("rediss://:hunter2@host?ssl_ca_certs=/no/such/ca.pem", "/no/such/ca.pem: No such file"),
        (f"rediss://:hunter2@host?ssl_ca_certs={__file__}",
         f"ssl_ca_certs: {__file__} holds no certificate"),
        (f"rediss://:hunter2@host?ssl_certfile={__file__}",
         f"ssl_certfile: {__file__} holds no certificate"),
        (f"rediss://:hunter2@host?ssl_keyfile={__file__}", "without ssl_certfile"),
        ("redis://:hunter2@host?ssl_ca_certs=x", "write rediss"),
        ("redis://host?sentinel_password=hunter2", "unknown option"),
        ("unix://", "write redis://"),
    ],
)  # fmt: skip
def test_invalid_redis_url_is_reported_without_password(url: str, reason: str) -> None:
    (problem,) = problems({"redis.url": url})
    assert problem.startswith("--redis.url: ")
    assert reason in problem
    assert "hunter2" not in problem
    assert "hun/" not in problem


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "ssl_certfile without ssl_keyfile: {cert}: holds no key (PEM)"),
        ("&ssl_keyfile={missing}", "ssl_keyfile: {missing}: No such file or directory"),
        ("&ssl_keyfile={cert}", "ssl_keyfile: {cert}: holds no key (PEM)"),
        (
            "&ssl_keyfile={other}",
            "ssl_keyfile: {other}: is not the key of the certificate in {cert}",
        ),
        ("&ssl_keyfile={rsa}", "ssl_keyfile: {rsa}: is not the key of the certificate in {cert}"),
    ],
)
def test_unusable_key_for_redis_is_named(key: str, reason: str, tmp_path: Path) -> None:
    authority, rsa = Authority(tmp_path / "ours"), tmp_path / "rsa.key"
    openssl("genpkey", "-algorithm", "RSA", "-out", rsa)
    (cert, _), (_, other) = authority.sign("own"), authority.sign("other")
    files = {"cert": cert, "other": other, "rsa": rsa, "missing": tmp_path / "missing.key"}
    url = f"rediss://:hunter2@host?ssl_certfile={cert}{key.format(**files)}"
    (problem,) = problems({"redis.url": url})
    assert problem.startswith(f"--redis.url: {reason.format(**files)}")
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    ("redis", "shown"),
    [
        ("url: redis://host", "host:6379"),
        ("url: 'rediss://user:p@[::1]:1/2'", "[::1]:1"),
        ("url: 'rediss://user:p@[::1]?ssl_cert_reqs=none&protocol=2'", "[::1]:6379"),
        ("url: 'unix:///run/redis?db=2&password=p'", "/run/redis"),
        (
            "url: 'redis://user:p@', sentinels: [a:1, b:2], service: main, sentinel_password: q",
            "main of sentinels a:1,b:2",
        ),
        ("url: 'rediss://a/3', sentinels: [a:1], service: main", "main of sentinels a:1"),
        ("cluster: [a:6379, '[::1]:2']", "cluster a:6379,[::1]:2"),
        ("url: 'rediss:///0', cluster: [a:1]", "cluster a:1"),
    ],
)
def test_redis_is_one_server_or_sentinels_or_cluster(redis: str, shown: str, write: Write) -> None:
    loaded = load({}, {}, write(f"redis: {{{redis}}}")).redis
    assert address(connect(loaded, "test")) == shown


@pytest.mark.parametrize("password", ["p@/?#%41", "{p@}", "[p@", "[p@]:"])
def test_redis_password_is_taken_as_it_is(password: str) -> None:
    env = {"EXTPROC_REDIS__URL": "redis://joe@host:1/2", "EXTPROC_REDIS__PASSWORD": password}
    redis = load({}, env).redis
    assert redis.options["username"] == "joe"
    assert redis.options["password"] == password
    assert "p@" not in repr(redis)


def test_yaml_merge_key_may_be_overridden(write: Write) -> None:
    file = write(
        "pools:\n  a: &a {replicas: [a:1], replicas_file: /a}\n"
        "  b: &b {<<: *a, replicas: [b:1]}\n  c: {<<: *b, replicas_file: /c}\n"
    )
    *_, b, c = load({}, {}, file).each_pool
    assert [item.where for item in (*b.replicas, *c.replicas)] == ["b:1", "b:1"]
    assert (b.replicas_file, c.replicas_file) == (Path("/a"), Path("/c"))


def test_unreadable_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "extproc.yaml"
    assert problems(file=file) == [f"{file}: cannot be read: No such file or directory"]
    file.write_bytes("pool: café".encode("latin-1"))
    assert problems(file=file) == [f"{file}: not YAML: byte 10 is not UTF-8"]


@pytest.mark.parametrize("text", ["[a:1", "[2024-13-45]", "[" * 1000])
def test_flag_with_invalid_yaml_is_one_line(text: str) -> None:
    (problem,) = problems(flags={"replicas": text})
    assert problem.startswith("--replicas: not YAML: ")


def test_every_key_has_a_description() -> None:
    assert [key for key, field in settings.LEAVES.items() if not field.description] == []


def test_flags_reach_the_configuration() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "serve")
    words = [word for key in settings.LEAVES for word in (f"--{key}", "")]
    assert set(settings.LEAVES) < set(vars(parser.parse_args(words)))  # those not shown, too
    args = parser.parse_args(["--poll.interval_s", "0.5", "--route.policy_header=x-policy"])
    config = configured(args)
    assert config.poll.interval_s == 0.5
    assert config.route.policy_header == "x-policy"


def test_every_policy_can_be_configured() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)


def test_each_pool_has_its_own_configuration(write: Write) -> None:
    file = write(
        "replicas: [a:1]\npools:\n  batch: {replicas: [b:1, 'b:2']}\n  new: {replicas_file: /f}\n"
    )
    own, batch, new = load({"poll.interval_s": "0.5"}, {}, file).each_pool
    assert (own.pool, [item.url for item in own.replicas]) == ("default", ["a:1"])
    assert (batch.pool, [item.url for item in batch.replicas]) == ("batch", ["b:1", "b:2"])
    assert (new.pool, new.replicas, new.replicas_file) == ("new", (), Path("/f"))
    assert {item.poll.interval_s for item in (own, batch, new)} == {0.5}
