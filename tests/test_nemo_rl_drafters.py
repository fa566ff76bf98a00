# SPDX-License-Identifier: Apache-2.0
"""The driver's part of remote drafters in NeMo-RL, their metrics, fields and secret, without Ray and engines."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from nemo_rl_records import watching_logger

from nemo_specrollout.cli.describe import describe_nemo_rl
from nemo_specrollout.config.addresses import any_port, check_listening_address, is_loopback
from nemo_specrollout.config.block import BLOCK_PATH
from nemo_specrollout.config.drafter_configs import (
    DRAFTERS,
    SECRET_VARIABLE,
    RemoteDrafterConfig,
    as_key,
    secret_of_run,
)
from nemo_specrollout.config.strict import ConfigError, build_tagged
from nemo_specrollout.generation.engine.remote_calls import WorkerCalls
from nemo_specrollout.nemo_rl.metrics import metrics_below
from nemo_specrollout.nemo_rl.ray_calls import ActorFailed, ActorLink, EngineClient
from nemo_specrollout.nemo_rl.remote_drafters import (
    HANG_S,
    START_S,
    RemoteDrafters,
    stats_between,
)
from nemo_specrollout.nemo_rl.step_log import StepLog
from nemo_specrollout.remote.drafter.drafter_spec import GPU_MEMORY_SHARE, DrafterReport, drafter_spec
from nemo_specrollout.remote.protocol.drafter_stats import DrafterStats, in_words

pytestmark = pytest.mark.unit

HERE, THERE = "tcp://127.0.0.1:5570", "tcp://10.0.0.7:5571"


class ScriptedLink(ActorLink):
    """A link without an actor: it returns the status, or raises the failure, that a test sets."""

    def __init__(self) -> None:
        self.next: DrafterReport | ActorFailed | None = None
        self.waits_s = 0.0
        self.num_ended = 0
        """Times that the driver has ended the actor's process."""
        self.is_closed = False

    @property
    def waited_s(self) -> float:
        return self.waits_s

    def answer(self) -> DrafterReport | None:
        told, self.next = self.next, None
        if isinstance(told, ActorFailed):
            raise told
        return told

    def call(self, method: str, *arguments: Any) -> None:
        assert (method, arguments) == ("status", ())

    def restart(self) -> None:
        self.num_ended += 1

    def close(self) -> None:
        self.is_closed = True


class Engines(EngineClient):
    """Engines without actors, whose calls `answer` serves."""

    def __init__(self, answer: Callable[[Callable[..., object], list[Any]], list[Any]], num_engines: int = 1) -> None:
        self._answer, self.num_engines = answer, num_engines

    def call_each(self, method: Callable[..., object], arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        return self._answer(method, [list(a or ()) for a in arguments])


class Driver:
    """`RemoteDrafters` with two drafters, their links, and the calls of the engines."""

    def __init__(self, *, starts_later: bool = False) -> None:
        self.links: list[ScriptedLink] = []
        self.told: list[tuple[Callable[..., object], list[Any]]] = []
        self.log = StepLog()
        self.drafters = RemoteDrafters(self._start, "known to few", self.log, starts_later=starts_later)

    def look(self, *news: DrafterReport | ActorFailed | None) -> list[list[str]]:
        """Sets the status of each drafter, and returns the addresses that the engines then get."""
        for link, said in zip(self.links, news, strict=False):
            link.next = said
        self.drafters.update(Engines(self._call))
        told, self.told = self.told, []
        assert all(
            method == WorkerCalls.specrollout_drafters_at and secret == "known to few" for method, (_, secret) in told
        )
        return [addresses for _, (addresses, _) in told]

    @property
    def num_restarts(self) -> float:
        return self.drafters.num_restarts

    def _start(self) -> list[ScriptedLink]:
        self.links = [ScriptedLink(), ScriptedLink()]
        return self.links

    def _call(self, method: Callable[..., object], arguments: list[Any]) -> list[Any]:
        self.told.append((method, arguments[0]))
        return [None]


def at(address: str, actor: int, *, silence_s: float = 0.0) -> DrafterReport:
    return DrafterReport(address, is_up=True, process=actor, silence_s=silence_s)


def test_engines_get_new_addresses_of_drafters_without_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver()
    assert driver.look(None, None) == []
    assert driver.look(at(HERE, 1), DrafterReport("", process=2)) == [[HERE, ""]]
    assert driver.look(at(HERE, 1), at(THERE, 2)) == [[HERE, THERE]]
    assert driver.look(at(HERE, 1), at(THERE, 2)) == []
    assert driver.log.alarms == [] and driver.num_restarts == 0
    shown = capsys.readouterr().out.splitlines()  # `publish-draft` needs them
    assert shown == [
        f"  • specrollout drafters listen at {HERE}, not placed yet",
        f"  • specrollout drafters listen at {HERE}, {THERE}",
    ]


def test_a_drafter_that_was_started_again_has_another_address() -> None:
    """Ray starts the actor again by itself; until then its calls fail."""
    driver = Driver()
    driver.look(at(HERE, 1), at(THERE, 2))
    assert driver.look(None, ActorFailed("node died")) == [[HERE, ""]]
    assert driver.look(None, ActorFailed("it is not available yet")) == []
    elsewhere = "tcp://10.0.0.8:5572"
    assert driver.look(None, at(elsewhere, 3)) == [[HERE, elsewhere]]
    (alarm,) = driver.log.alarms
    assert "drafter 1" in alarm and THERE in alarm and "node died" in alarm
    assert driver.num_restarts == 1 and [link.num_ended for link in driver.links] == [0, 0]


def test_an_end_between_two_looks_is_told() -> None:
    """Ray starts the actor again so soon that no call fails: the next report is another process's."""
    driver = Driver()
    driver.look(at(HERE, 1), at(THERE, 2))
    elsewhere = "tcp://10.0.0.8:5572"
    assert driver.look(at(HERE, 1), at(elsewhere, 3)) == [[HERE, elsewhere]]
    (alarm,) = driver.log.alarms
    assert "drafter 1" in alarm and THERE in alarm and "the rollout goes on" in alarm
    driver.look(at(HERE, 1), at(elsewhere, 3))
    assert driver.num_restarts == 1 and len(driver.log.alarms) == 1


def test_a_drafter_that_refuses_new_weights_is_an_alarm_once_for_each_reason() -> None:
    driver = Driver()
    sound = at(HERE, 1)
    driver.look(replace(sound, weights_problem="version_2 is half-written"), at(THERE, 2))
    driver.look(replace(sound, weights_problem="version_2 is half-written"), at(THERE, 2))
    driver.look(sound, at(THERE, 2))
    driver.look(replace(sound, weights_problem="version_3 is damaged"), at(THERE, 2))
    first, second = driver.log.alarms
    assert first == f"drafter 0 at {HERE} goes on with the weights that it has: version_2 is half-written"
    assert "version_3 is damaged" in second and driver.num_restarts == 0


def test_a_drafter_that_failed_or_hangs_is_ended() -> None:
    """A failure leaves the actor alive; a hang is a loop that stands still, or an actor that does not answer."""
    driver = Driver()
    driver.look(at(HERE, 1), at(THERE, 2))
    assert driver.look(ActorFailed("out of memory", is_alive=True), at(THERE, 2, silence_s=HANG_S + 1)) == [["", ""]]
    assert [link.num_ended for link in driver.links] == [1, 1]
    driver.look(at(HERE, 3), at(THERE, 4))
    for link in driver.links:
        link.waits_s = HANG_S + 1
    driver.look(None, None)
    assert [link.num_ended for link in driver.links] == [2, 2] and len(driver.log.alarms) == 4
    driver.look(None, None)
    assert [link.num_ended for link in driver.links] == [2, 2] and driver.num_restarts == 2


def test_a_drafter_that_loads_may_be_silent_for_longer() -> None:
    driver = Driver()
    driver.look(DrafterReport("", process=1, silence_s=HANG_S + 1), DrafterReport("", process=2, silence_s=START_S + 1))
    assert [link.num_ended for link in driver.links] == [0, 1]


def test_drafters_on_gpus_start_after_all_workers_and_all_end() -> None:
    driver = Driver(starts_later=True)
    assert driver.links == [] and driver.num_restarts == 0
    assert driver.look() == []
    assert len(driver.links) == 2
    driver.drafters.close()
    assert [link.is_closed for link in driver.links] == [True, True]


def test_an_engine_that_cannot_be_told_does_not_end_the_run() -> None:
    driver = Driver()

    def fails(method: str, arguments: Sequence[Any]) -> list[Any]:
        raise RuntimeError("the engine is gone")

    driver.links[0].next = at(HERE, 1)
    driver.drafters.update(Engines(fails))
    assert ["the engine is gone" in alarm for alarm in driver.log.alarms] == [True]


BEFORE = DrafterStats(num_request_steps=10, num_supplied=4, num_kept=8, num_drafters=2, num_ready=1, num_failures=1)
AFTER = DrafterStats(
    num_request_steps=30, num_supplied=14, num_at_hand=40, num_kept=48, num_wrong=10, num_drafters=2, num_ready=2,
    num_failures=1, draft_token_s=0.002,
)  # fmt: skip


def test_drafter_stats_are_summed_before_they_are_divided() -> None:
    replies = [[BEFORE, DrafterStats()], [AFTER, DrafterStats(num_request_steps=20, num_drafters=2)]]

    def call(method: Callable[..., object], arguments: Sequence[Any]) -> list[Any]:
        assert (method, list(arguments)) == (WorkerCalls.specrollout_drafter_stats, [[], []])
        return [asdict(supply) for supply in replies.pop(0)]

    workers = Engines(call, num_engines=2)
    before = workers.drafter_stats()
    figures = stats_between(before, workers.drafter_stats())
    assert (figures["num_request_steps"], figures["num_supplied"], figures["num_kept"]) == (40, 10, 40)
    assert (figures["occupancy"], figures["run_ahead"], figures["waste"]) == (0.25, 1.0, 0.25)
    assert (figures["num_drafters"], figures["num_ready"]) == (2, 0), "for the engine that has least"
    assert figures["num_failures"] == 0


def test_what_is_dropped_may_have_come_before_the_step() -> None:
    assert DrafterStats(num_kept=10, num_wrong=12).figures()["waste"] == 1.0


def test_a_step_without_wanted_drafts_has_no_ratios() -> None:
    names = metrics_below("draft_supply", DrafterStats.together([DrafterStats(num_drafters=1)]).figures())
    assert "specrollout/draft_supply/occupancy" not in names and names["specrollout/draft_supply/num_ready"] == 0
    assert "specrollout/draft_supply/bottleneck" not in names, "NeMo-RL logs numbers"


def test_drafter_stats_reach_the_record_and_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = stats_between([BEFORE], [AFTER])
    logger = watching_logger(tmp_path, log=StepLog(entries={"draft_supply": stats}))
    logger.log_metrics(
        {"token_mult_prob_error": 1.0, "loss": 0.1, **metrics_below("draft_supply", stats)}, 1, prefix="train"
    )
    logger.finish()
    (line,) = (tmp_path / "specrollout" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["draft_supply"]["bottleneck"] == "the drafters"
    assert json.loads(line)["draft_supply"]["occupancy"] == 0.5
    assert "2 of 2 drafters; drafts in time for 50% of request steps" in capsys.readouterr().out


def test_a_run_has_the_secret_of_its_environment_or_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    first, second = secret_of_run(), secret_of_run()
    assert first != second and len(as_key(first)) == 64
    assert as_key(os.fsdecode(b"\xff" * 20)) == b"\xff" * 20  # of an environment that is not in UTF-8
    monkeypatch.setenv(SECRET_VARIABLE, "sixteen letters.")
    assert secret_of_run() == "sixteen letters."
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ConfigError, match=f"{SECRET_VARIABLE}: too short; give it at least 16") as caught:
        secret_of_run()
    assert "'short'" not in str(caught.value)


def test_a_problem_that_is_over_is_told() -> None:
    stats = DrafterStats(
        num_drafters=1, num_ready=1, num_failures=2, num_refused=3, last_problem="left a step unanswered"
    )
    assert "; 2 failures and 3 requests refused, the latest: left a step unanswered" in in_words(stats.figures())
    assert "failures" not in in_words(DrafterStats(num_drafters=1, num_ready=1).figures())
    assert DrafterStats.together([DrafterStats(), stats]).last_problem == "left a step unanswered"


def test_a_secret_of_any_bytes_is_a_key() -> None:
    assert as_key("sixteen letters \udcff") == b"sixteen letters \xff"


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "fd00::1", "fe80::1%eth0"])
def test_any_port_is_an_address(host: str) -> None:
    check_listening_address("host", any_port(host))


def remote(**fields: Any) -> RemoteDrafterConfig:
    """Returns the drafter of a block with these fields. Raises ConfigError, as `check` does."""
    built = build_tagged(DRAFTERS, {"type": "remote", "model": "DRAFT", **fields}, f"{BLOCK_PATH}.drafters[0]")
    assert isinstance(built, RemoteDrafterConfig)
    return built


@pytest.mark.parametrize(
    "address",
    [
        HERE, "tcp://node-01.cluster_a.example:5570", "tcp://localhost:65535", "tcp://[::1]:5570", "tcp://[fd00::7]:5570",
        "tcp://[fe80::1%eth0]:5570", "tcp://[::ffff:10.0.0.7]:5570",
    ],
)  # fmt: skip
def test_addresses_of_drafters(address: str) -> None:
    assert remote(addresses=[address]).addresses == (address,)
    check_listening_address("--address", address)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("10.0.0.7:5570", "is not an address; write tcp://HOST:PORT"),
        (" tcp://10.0.0.7:5570", "is not an address; write"),
        ("tcp://10.0.0.7:5570 ", "is not an address; write"),
        ("tcp://10.0.0.7:5570\n", "is not an address; write"),
        ("tcp://10.0.0.7", "is not an address; write"),
        ("tcp://10.0.0.7:65536", "is not an address; write"),
        ("tcp://10.0.0.300:5570", "is not an address; write"),
        ("tcp://10.0.0:5570", "is not an address; write"),
        ("tcp://10.0.0.7:\u0665\u0665", "is not an address; write"),
        ("tcp://nödé:5570", "is not an address; write"),
        ("tcp://::1:5570", r"is not an address; write .* or tcp://\[::1\]:5570"),
        ("tcp://[10.0.0.7]:5570", "is not an address; write"),
        ("tcp://[::g]:5570", "is not an address; write"),
        ("tcp://[fe80::1%e th]:5570", "is not an address; write"),
        ("tcp://*:5570", "is not an address; write .* or tcp://0.0.0.0:PORT to listen at all IPv4 addresses"),
        ("tcp://[fe80::1]:5570", r"exists on each interface of a machine; write .* tcp://\[fe80::1%eth0\]:5570"),
        ("ipc:///tmp/socket", "is not an address; write"),
        ("", "is not an address; write"),
    ],
)
def test_what_is_no_address_is_refused_on_both_ends(address: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"drafters\[0\]\.addresses: {re.escape(repr(address))} {sentence}"):
        remote(addresses=[address])
    with pytest.raises(ConfigError, match=f"--address: {re.escape(repr(address))} {sentence}"):
        check_listening_address("--address", address)


@pytest.mark.parametrize(
    ("addresses", "sentence"),
    [
        (["tcp://10.0.0.7:0"], "has port 0, where nothing listens"),
        (["tcp://0.0.0.0:5570"], "is the address of no machine"),
        (["tcp://[::]:5570"], "is the address of no machine"),
        ([HERE, THERE, HERE], "are the same drafter; write it once"),
        (["tcp://[fd00::7]:5570", "tcp://[fd00:0::7]:05570"], "are the same drafter; write it once"),
    ],
)
def test_addresses_at_which_only_a_drafter_can_listen(addresses: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        remote(addresses=addresses)
    for address in addresses:
        check_listening_address("--address", address)


def test_only_loopback_addresses_need_no_secret() -> None:
    assert all(map(is_loopback, ["tcp://127.0.0.1:1", "tcp://127.0.0.2:1", "tcp://localhost:1", "tcp://[::1]:1"]))
    assert not any(
        map(is_loopback, ["tcp://10.0.0.7:1", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://node:1", "localhost"])
    )


@pytest.mark.parametrize(("named", "sentence"), [
    ("", "'' is no path; name the folder that weights are published to, or remove it"),
    ("a\0b", r"'a\\x00b' is no path"),
    ("DRAFT", "'DRAFT' is a checkpoint itself; name a folder with a subfolder for each checkpoint"),
    (__file__, "is not a folder; name the one that weights are published to"),
])  # fmt: skip
def test_what_can_be_no_folder_of_weights_is_refused(named: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"drafters\[0\]\.weights_from: .*{sentence}"):
        remote(addresses=[HERE], weights_from=named)


def test_a_folder_of_weights_need_not_be_there_yet(tmp_path: Path) -> None:
    later = tmp_path / "later"
    assert remote(workers=1, weights_from=str(later)).weights_from == str(later)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a checkpoint itself"):
        remote(workers=1, weights_from=str(tmp_path))


HOSTS = ["10.0.0.7", "10.0.0.0/24", "0.0.0.0/0", "fd00::7", "fd00::/8", "fe80::1%eth0", "node-01.cluster", "localhost"]


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_that_may_be_allowed(host: str) -> None:
    assert remote(addresses=[HERE], allowed_hosts=[host]).allowed_hosts == (host,)


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("127.0.0.1 ", "is neither an IP address, .* without blanks"),
        (" node01", "is neither an IP address"),
        ("", "is neither an IP address"),
        ("10.0.0.300", "is neither an IP address"),
        ("10.0.0", "is neither an IP address"),
        ("10.0.0.1-10.0.0.9", "is neither an IP address"),
        ("10.0.0.7:5570", "is neither an IP address, .* or a port"),
        ("[::1]", "is neither an IP address, .* brackets"),
        ("tcp://10.0.0.7:5570", "is neither an IP address"),
        ("10.0.0.7/8", "has bits beyond its prefix; write 10.0.0.0/8, or one address"),
        ("10.0.0.0/33", "is neither an IP address"),
        ("*", "is no host; leave the list empty to allow every host that knows the secret"),
        ("10.0.0.*", "is no host; .* or write a network such as 10.0.0.0/24"),
        ("0.0.0.0", "is the address of no machine; leave the list empty"),
        ("::", "is the address of no machine; leave the list empty"),
    ],
)
def test_what_is_no_host_is_refused(host: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"drafters\[0\]\.allowed_hosts: {re.escape(repr(host))} {sentence}"):
        remote(addresses=[HERE], allowed_hosts=[host])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"workers": 1, "gpus": 1.5}, r"gpus: 1.5 is out of range"),
        ({"addresses": [HERE], "gpus": 1.0}, r"gpus: 1.0; drafters at addresses .* remove it, or set workers"),
    ],
)
def test_gpus_are_of_drafters_that_ray_places(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_tagged(DRAFTERS, {"type": "remote", "model": "DRAFT", **fields}, f"{BLOCK_PATH}.drafters[0]")


def test_a_drafter_that_shares_a_gpu_takes_its_share_of_it() -> None:
    engine = {"max_model_len": 64, "precision": "bfloat16", "async_engine": True}
    drafter = RemoteDrafterConfig(model="DRAFT", workers=2, gpus=0.5)
    kwargs = drafter_spec(drafter, engine, on_cpu=False).vllm_kwargs
    assert kwargs["gpu_memory_utilization"] == GPU_MEMORY_SHARE / 2
    assert "gpu_memory_utilization" not in drafter_spec(drafter, engine, on_cpu=True).vllm_kwargs


def test_check_says_that_ray_places_them() -> None:
    drafter = {"type": "remote", "model": "DRAFT", "workers": 2, "gpus": 0.5}
    tree = {"grpo": {}, "policy": {"generation": {"specrollout": {"drafters": [drafter]}}}}
    said = [text for name, text in describe_nemo_rl(tree) if name == "placement"]
    assert "2 in Ray actors of 1 CPU and 0.5 GPU each" in said[0]
