import argparse
from pathlib import Path
from typing import get_args

import pytest

from extproc import settings
from extproc.cli.configuration import add_flags, configured
from extproc.config import REMOVED, Config, PolicyName
from extproc.route.policies import POLICIES
from extproc.settings import ConfigError, load
from extproc.share.connection import address, connect


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "extproc.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(
    flags: dict[str, str] | None = None, env: dict[str, str] | None = None, file: Path | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(flags or {}, env or {}, file)
    return caught.value.problems


@pytest.mark.parametrize("key", REMOVED)
def test_removed_setting_names_its_replacement(key: str) -> None:
    assert problems({key: "1"}) == [f"--{key}: {key!r} was removed: {REMOVED[key]}"]


def test_nothing_set_gives_the_defaults() -> None:
    assert load({}, {}) == Config()


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = write(tmp_path, "poll: {interval_s: 0.1, timeout_s: 1, admin: 'a:1'}")
    env = {"EXTPROC_POLL__INTERVAL_S": "0.2", "EXTPROC_POLL__TIMEOUT_S": "1.5"}
    poll = load({"poll.interval_s": "0.3"}, env, file).poll
    assert (poll.interval_s, poll.timeout_s, poll.admin) == (0.3, 1.5, "a:1")


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "pool: from-file")
    assert load({}, {"EXTPROC_CONFIG": str(file)}).pool == "from-file"


def test_a_file_given_wins_over_the_one_the_environment_names(tmp_path: Path) -> None:
    file = write(tmp_path, "pool: given")
    assert load({}, {"EXTPROC_CONFIG": "/does/not/exist.yaml"}, file).pool == "given"


@pytest.mark.parametrize("text", ["a:1, b:2", '["a:1", "b:2"]', "[{url: a:1}, {url: 'b:2'}]"])
def test_lists_are_written_with_commas_or_as_yaml(text: str) -> None:
    config = load({}, {"EXTPROC_REPLICAS": text})
    assert [replica.url for replica in config.replicas] == ["a:1", "b:2"]


def test_an_ipv6_address_is_no_list() -> None:
    config = load({"serve.listen": "[::]:50051"}, {"EXTPROC_POLL__ADMIN": "[::1]:9089"})
    assert (config.serve.listen, config.poll.admin) == ("[::]:50051", "[::1]:9089")
    for text in ("[fd00::1]:8000, [fd00::2]:8000", '["[fd00::1]:8000", "[fd00::2]:8000"]'):
        urls = [replica.url for replica in load({"replicas": text}, {}).replicas]
        assert urls == ["[fd00::1]:8000", "[fd00::2]:8000"]
    (problem,) = problems(flags={"serve.listen": "[::1]:http"})
    assert "not an address of the form" in problem


def test_mappings_are_written_as_yaml() -> None:
    config = load({"request.tokenizers": "{llama: /tokenizer.json}"}, {})
    assert config.request.tokenizers == {"llama": Path("/tokenizer.json")}


def test_text_that_looks_like_a_number_stays_text() -> None:
    assert load({}, {"EXTPROC_POOL": "123"}).pool == "123"


def test_an_empty_variable_counts_as_unset() -> None:
    assert load({}, {"EXTPROC_ROUTE__SEED": ""}).route.seed is None


def test_a_section_whose_keys_are_all_commented_out_is_fine(tmp_path: Path) -> None:
    assert load({}, {}, write(tmp_path, "poll:\n  # interval_s: 1\n")) == Config()


def test_an_empty_file_is_fine(tmp_path: Path) -> None:
    assert load({}, {}, write(tmp_path, "# nothing\n")) == Config()


@pytest.mark.parametrize(
    "name", ["EXTPROC_SERVICE_HOST", "EXTPROC_PORT", "EXTPROC_PORT_50051_TCP_ADDR"]
)
def test_what_kubernetes_sets_for_a_service_named_extproc_is_left_alone(name: str) -> None:
    assert load({}, {name: "tcp://10.0.0.1:50051"}) == Config()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("poll.intervall_s", "poll.interval_s"), ("servee.listen", "serve.listen"), ("pol", "pool")],
)
def test_an_unknown_key_is_named_with_its_source_and_the_nearest(
    tmp_path: Path, key: str, nearest: str
) -> None:
    section, _, name = key.rpartition(".")
    file = write(tmp_path, f"{section}: {{{name}: 1}}" if section else f"{name}: 1")
    variable = f"EXTPROC_{key.replace('.', '__').upper()}"
    hint = f"unknown key {key!r}; did you mean {nearest!r}?"
    assert problems(file=file) == [f"{file}: {hint}"]
    assert problems(env={variable: "1"}) == [f"variable {variable}: {hint}"]
    assert problems(flags={key: "1"}) == [f"--{key}: {hint}"]


def test_each_wrong_value_is_one_line_with_source_key_and_value(tmp_path: Path) -> None:
    file = write(tmp_path, "poll: {interval_s: soon}\nlog: {level: loud}")
    found = problems(
        flags={"serve.listen": "nowhere"}, env={"EXTPROC_POLL__TIMEOUT_S": "-2"}, file=file
    )
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


@pytest.mark.parametrize(
    "url", ["10.0.0.1", "::1:80", "https://x:1", "x:99999", "x:", ":80", "x:80/p", "[x]:1", "a b:1"]
)
@pytest.mark.parametrize("key", ["url", "dns"])
def test_a_replica_without_host_and_port_is_named(key: str, url: str) -> None:
    (problem,) = problems(env={"EXTPROC_REPLICAS": f"[{{url: a:1}}, {{{key}: '{url}'}}]"})
    assert problem.startswith(f"variable EXTPROC_REPLICAS: replicas.1.{key}: ")
    assert "host:port" in problem


@pytest.mark.parametrize(
    ("said", "where", "reason"),
    [
        ("kubernetes: {service: 'vllm:8000', port: 1}", ".kubernetes.service", "letters, digits"),
        ("kubernetes: {service: vllm, port: 1, namespace: ''}", ".kubernetes.namespace", "letters"),
        ("kubernetes: {service: vllm, port: 0}", ".kubernetes.port", "from 1 to 65535"),
        ("kubernetes: {service: vllm, port: '65536'}", ".kubernetes.port", "from 1 to 65535"),
        ("kubernetes: {service: vllm, port: 'a b'}", ".kubernetes.port", "letters, digits"),
        ("kubernetes: {service: vllm}", ".kubernetes.port", "required"),
        ("url: a:1, dns: a:1", "", "needs one of 'url', 'dns' and 'kubernetes'"),
        ("name: one", "", "needs one of 'url', 'dns' and 'kubernetes'"),
    ],
)
def test_a_replica_is_named_in_one_way(said: str, where: str, reason: str) -> None:
    (problem,) = problems(env={"EXTPROC_REPLICAS": f"[{{{said}}}]"})
    assert problem.startswith(f"variable EXTPROC_REPLICAS: replicas.0{where}: ")
    assert reason in problem


@pytest.mark.parametrize(("port", "taken"), [("8000", 8000), ("'8000'", 8000), ("http", "http")])
def test_a_service_of_kubernetes(port: str, taken: int | str) -> None:
    given = f"[{{kubernetes: {{service: vllm, port: {port}}}}}]"
    [replica] = load({}, {"EXTPROC_REPLICAS": given}).replicas
    assert replica.kubernetes is not None
    assert replica.kubernetes.port == taken
    assert replica.where == f"Service vllm, port {taken}"


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
        ("redis://host:99999", "write redis://"),
        ("redis://[::1:6379", "write redis://"),
        ("redis://a:1,b:2", "write redis://"),
        ("redis://host/hunter2", "the database of Redis is a number"),
        ("redis://host?db=hunter2", "invalid value for 'db'"),
        ("redis://:hunter2@host?no_such_option=1", "unknown option"),
        ("rediss://:hunter2@host?ssl_ca_cert=x", "did you mean 'ssl_ca_certs'?"),
        ("rediss://:hunter2@host?ssl_cert_reqs=maybe", "required, optional, none"),
        ("rediss://:hunter2@host?ssl_check_hostname=perhaps", "one of yes, true"),
        ("rediss://:hunter2@host?ssl_ca_certs=/no/such/ca.pem", "/no/such/ca.pem: No such file"),
        (f"rediss://:hunter2@host?ssl_ca_certs={__file__}", "holds no certificate"),
        (f"rediss://:hunter2@host?ssl_certfile={__file__}", "ssl_certfile and ssl_keyfile: "),
        (f"rediss://:hunter2@host?ssl_keyfile={__file__}", "without ssl_certfile"),
        ("redis://:hunter2@host?ssl_ca_certs=x", "write rediss"),
        ("redis://host?sentinel_password=hunter2", "unknown option"),
        ("unix://", "write redis://"),
    ],
)
def test_an_address_of_redis_that_is_none_is_named_without_its_password(
    url: str, reason: str
) -> None:
    (problem,) = problems({"redis.url": url})
    assert problem.startswith("--redis.url: ")
    assert reason in problem
    assert "hunter2" not in problem
    assert "hun/" not in problem


@pytest.mark.parametrize(
    ("settings", "shown"),
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
def test_redis_is_one_server_or_sentinels_or_cluster(
    settings: str, shown: str, tmp_path: Path
) -> None:
    redis = load({}, {}, write(tmp_path, f"redis: {{{settings}}}")).redis
    assert address(connect(redis, "test")) == shown


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("url: 'redis://:hunter2@/0'", "names no host"),
        ("sentinels: [a:1]", "sentinels and service go together"),
        ("service: main", "sentinels and service go together"),
        ("sentinels: [a:1], service: main, cluster: [a:1]", "not both"),
        ("cluster: [a:1], url: 'redis://:hunter2@a/2'", "no database but 0"),
        ("cluster: [a:1], url: unix:///run/redis", "need a URL that begins with redis"),
        ("cluster: [a]", "host:port"),
    ],
)
def test_redis_in_two_forms_or_half_of_one_is_refused(
    settings: str, reason: str, tmp_path: Path
) -> None:
    (problem,) = problems(file=write(tmp_path, f"redis: {{{settings}}}"))
    assert reason in problem
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    "key", ["route.session_header", "request.tenant_header", "hold.objective_header"]
)
def test_a_header_has_a_name_that_headers_can_have(key: str) -> None:
    (problem,) = problems({key: "x tenant:"})
    assert problem.startswith(f"--{key}: ")


def test_ports_of_kv_events_go_together() -> None:
    both = "{url: a:1, kv_events_port: 5557, kv_events_replay_port: 5558}"
    [replica] = load({}, {"EXTPROC_REPLICAS": f"[{both}]"}).replicas
    assert replica.kv_events_ports == (5557, 5558)
    (problem,) = problems(env={"EXTPROC_REPLICAS": "[{url: a:1, kv_events_port: 5557}]"})
    assert "kv_events_port and kv_events_replay_port go together" in problem


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", "not YAML: line 1, column 6: "),
        ("pool: 2024-13-45", "line 1, column 7: not a valid timestamp"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("a: &a {b: *a}", "recursive"),
        (
            "serve: {drain_s: 2}\nroute:\n  policy: lmetric\nserve:\n",
            "line 4, column 1: the key 'serve' is already there in line 1",
        ),
        ('redis: {url: redis://h, "url": redis://g}', "column 25: the key 'url' is already there"),
        ("a: 1\n---\nb: 1", "must hold keys and values, not a list"),
        ("- a\n- b", "must hold keys and values"),
        ("just text", "must hold keys and values"),
    ],
)
def test_a_file_that_is_no_mapping_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    file = write(tmp_path, text)
    (problem,) = problems(file=file)
    assert problem.startswith(f"{file}: ")
    assert reason in problem
    assert "\n" not in problem


def test_a_key_may_come_again_from_a_mapping_that_is_merged(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "pools:\n  a: &a {replicas: [a:1], replicas_file: /a}\n"
        "  b: &b {<<: *a, replicas: [b:1]}\n  c: {<<: *b, replicas_file: /c}\n",
    )
    *_, b, c = load({}, {}, file).each_pool
    assert [one.where for one in (*b.replicas, *c.replicas)] == ["b:1", "b:1"]
    assert (b.replicas_file, c.replicas_file) == (Path("/a"), Path("/c"))


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "nothing.yaml"
    assert problems(file=file) == [f"{file}: cannot be read: No such file or directory"]


def test_a_file_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "extproc.yaml"
    file.write_bytes("pool: café".encode("latin-1"))
    assert problems(file=file) == [f"{file}: not YAML: byte 10 is not UTF-8"]


def test_a_broken_file_gives_no_password_away(tmp_path: Path) -> None:
    (problem,) = problems(file=write(tmp_path, "redis: {url: redis://:hunter2@host:6379"))
    assert "hunter2" not in problem


@pytest.mark.parametrize("text", ["[a:1", "[2024-13-45]", "[" * 3000])
def test_a_flag_that_is_no_yaml_list_is_one_line(text: str) -> None:
    (problem,) = problems(flags={"replicas": text})
    assert problem.startswith("--replicas: not YAML: ")


def test_every_key_has_a_description() -> None:
    undescribed = [key for key, field in settings.LEAVES.items() if not field.description]
    assert undescribed == []


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


def test_every_pool_is_a_configuration_of_its_own(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "replicas: [a:1]\npools:\n  batch: {replicas: [b:1, 'b:2']}\n  new: {replicas_file: /f}\n",
    )
    own, batch, new = load({"poll.interval_s": "0.5"}, {}, file).each_pool
    assert (own.pool, [one.url for one in own.replicas]) == ("default", ["a:1"])
    assert (batch.pool, [one.url for one in batch.replicas]) == ("batch", ["b:1", "b:2"])
    assert (new.pool, new.replicas, new.replicas_file) == ("new", (), Path("/f"))
    assert {one.poll.interval_s for one in (own, batch, new)} == {0.5}


def test_model_names_are_written_as_a_name_a_list_or_weights() -> None:
    models = "{a: b, l: [x, y], l2: [l2, x], c: {l: 95, a-next: 5}, d: l}"
    assert load({"route.models": models}, {}).route.models == {
        "a": {"b": 1.0},
        "l": ("x", "y"),
        "l2": ("l2", "x"),
        "c": {"l": 95.0, "a-next": 5.0},
        "d": {"l": 1.0},
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("zzzzz: 1", "unknown key 'zzzzz'"),
        ("poll: 3", "'poll' is a section: set its keys, for example 'poll.interval_s'"),
        (
            "replicas: [{url: 'a:1'}, {url: 'b:1', profil: llama-8b-h100}]",
            "unknown key 'replicas.1.profil'; did you mean 'profile'?",
        ),
        ("replicas: {url: a:1}", "replicas: must be a list; given: {'url': 'a:1'}"),
        (
            "request: {tokenizers: [a]}",
            "request.tokenizers: must hold keys and values; given: ['a']",
        ),
        (
            "hold: {objectives: {a: 5}}",
            "hold.objectives.a: must hold keys and values; given: 5",
        ),
        (
            "route: {models: {a: 5}}",
            "route.models.a: must be a name, a list of names, or names with weights; given: 5",
        ),
        ("route: {models: {a: []}}", "route.models.a.list: must not be empty; given: []"),
        (
            "route: {models: {a: {b: -1}}}",
            "route.models.a.weights.b: input should be greater than or equal to 0; given: -1",
        ),
    ],
)
def test_invalid_value_is_one_line_in_words_of_yaml(
    text: str, problem: str, tmp_path: Path
) -> None:
    file = write(tmp_path, text)
    assert problems(file=file) == [f"{file}: {problem}"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("poll: {interval_s: .inf}", "finite number"),
        ("serve: {drain_s: .nan}", "finite number"),
        ("poll: {timeout_s: 2}", "must be less than 5 s: a replica that answers late"),
        (
            "poll: {timeout_s: 1.5, interval_s: 1}",
            "must be less than 5 s: a replica that answers late",
        ),
        ("route: {policy: complet}", "; given: 'complet'; did you mean 'completion'?"),
        ("replicas: [{url: a:1, profile: llama-8b-h10}]", "did you mean 'llama-8b-h100'?"),
        ("pools: {default: {}}", "'default' is the name of the pool itself"),
        ("pools: {a b: {}}", "pools.a b"),
        ("pools: {batch: {replica: [a:1]}}", "unknown key 'pools.batch.replica'"),
        ("pools: {batch: {replicas: [a]}}", "'a' is not an address"),
        ("route: {models: {a: {}}}", "'a'"),
        ("route: {models: {a: {b: 0}}}", "'a'"),
        ("route: {models: {a: b, b: c}}", "'a' leads to 'b'"),
        ("route: {models: {a: [b, x], b: [x]}}", "'a' leads to 'b'"),
    ],
)
def test_value_that_cannot_work_is_named(text: str, part: str, tmp_path: Path) -> None:
    (problem,) = problems(file=write(tmp_path, text))
    assert part in problem


def test_a_poll_that_times_out_is_tried_for_three_timeouts() -> None:
    assert load({"poll.timeout_s": "1.5"}, {}).poll.give_up_s == 4.5
