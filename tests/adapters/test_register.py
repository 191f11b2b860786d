"""Registration: what is hooked, once; what is put back; what is reported and what is an error."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
from types import ModuleType

import pytest

import megatron_support
from megatron_support.adapters import registry
from megatron_support.adapters.hooks import Hook, HostAdapter, MissingSymbol, importable, symbol
from megatron_support.adapters.registry import HOSTS, register, unregister
from megatron_support.errors import ConfigurationError


class Trainer:
    """A class of a host, with the kinds of attributes that a hook may meet."""

    def method(self) -> str:
        return "original"

    @staticmethod
    def static() -> str:
        return "original"


@pytest.fixture
def host(monkeypatch):
    """A host that is there: a module with a function, a class and a registry."""
    module = ModuleType("fake_host")
    module.function = lambda: "original"
    module.Trainer = type("Trainer", (), dict(vars(Trainer)))
    module.LOSSES = {"vanilla": "theirs", "taken": "theirs"}
    module.__version__ = "1.2.3"
    monkeypatch.setitem(sys.modules, "fake_host", module)
    return module


def use(monkeypatch, *hooks: Hook, module: str = "fake_host") -> HostAdapter:
    """Make one host of the registry, slime, the fake one, and the only one."""
    adapter = HostAdapter(name="slime", module=module, distributions=("no-such-fake",), hooks=hooks, guide="its guide")
    monkeypatch.setattr(registry, "HOSTS", ("slime",))
    monkeypatch.setattr(registry, "_adapter", lambda name: adapter)
    return adapter


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    monkeypatch.setattr(registry, "_active", {})


def hook_all(hooks) -> None:
    module = sys.modules["fake_host"]
    hooks.replace(module, "function", lambda: "ours")
    hooks.replace(module.Trainer, "method", lambda self: "ours")
    hooks.replace(module.Trainer, "static", staticmethod(lambda: "ours"))
    hooks.insert(module.LOSSES, "policy_support", "ours", label="LOSSES[policy_support]")
    hooks.insert(module.LOSSES, "taken", "ours", label="LOSSES[taken]")


ALL = Hook(what="policy loss", apply=hook_all)


def test_every_change_is_made_and_every_original_is_reachable_and_put_back(host, monkeypatch):
    use(monkeypatch, ALL)
    before = {**vars(host.Trainer)}, host.function, dict(host.LOSSES)
    report = register("slime")["slime"]
    assert (host.function(), host.Trainer().method(), host.Trainer.static()) == ("ours", "ours", "ours")
    assert host.LOSSES == {"vanilla": "theirs", "taken": "ours", "policy_support": "ours"}
    assert report.originals["fake_host.function"] is before[1]
    assert report.originals["LOSSES[taken]"] == "theirs"
    unregister("slime")
    assert host.function is before[1]
    assert {**vars(host.Trainer)} == before[0]
    assert before[2] == host.LOSSES
    assert isinstance(vars(host.Trainer)["static"], staticmethod)


def test_registering_twice_is_registering_once(host, monkeypatch):
    original = host.function
    calls = []
    use(monkeypatch, Hook(what="policy loss", apply=lambda hooks: (calls.append(1), hook_all(hooks))))
    first, second = register("slime"), register()
    assert calls == [1]
    assert first["slime"] is second["slime"]
    unregister()
    unregister()
    assert host.function is original
    register("slime")
    assert calls == [1, 1]
    unregister("slime")
    assert host.function is original


def test_a_host_that_is_not_there_is_reported(monkeypatch, caplog):
    use(monkeypatch, ALL, module="no_such_host")
    with caplog.at_level(logging.INFO, logger="megatron_support"):
        report = register()
    assert report.hooked == ()
    assert report["slime"].version is None
    assert "no_such_host is not importable; install it (its guide)" in str(report)
    assert "no_such_host is not importable" in caplog.text


def test_a_host_that_is_not_there_is_an_error_by_name(monkeypatch):
    use(monkeypatch, ALL, module="no_such_host")
    with pytest.raises(ConfigurationError, match=r"slime must be installed to be registered by name: no_such_host"):
        register("slime")


def needs_more(hooks) -> None:
    symbol("fake_host", "removed_function")


def test_a_missing_symbol_names_version_and_symbol_and_leaves_nothing_changed(host, monkeypatch):
    use(monkeypatch, ALL, Hook(what="log-probability pass", apply=needs_more))
    original, losses = host.function, dict(host.LOSSES)
    with pytest.raises(
        ConfigurationError,
        match=r"log-probability pass: fake_host.removed_function does not exist in slime 1\.2\.3; use a release",
    ):
        register("slime")
    assert host.function is original and losses == host.LOSSES
    report = register()["slime"]
    assert report.hooked == ()
    assert report.declined == {"log-probability pass": "fake_host.removed_function does not exist"}
    assert host.function is original and losses == host.LOSSES


def test_an_attribute_that_is_inherited_only_is_missing(host, monkeypatch):
    child = type("Child", (host.Trainer,), {})
    use(monkeypatch, Hook(what="loss", apply=lambda hooks: hooks.replace(child, "method", None)))
    with pytest.raises(ConfigurationError, match=r"Child\.method does not exist"):
        register("slime")
    assert "method" not in vars(child)


def test_what_this_process_cannot_use_is_declined_and_the_rest_hooked(host, monkeypatch):
    use(monkeypatch, ALL, Hook(what="log-probability pass", apply=needs_more, needs=("no_such_trainer",)))
    report = register("slime")["slime"]
    assert report.hooked == ("policy loss",)
    assert report.declined == {"log-probability pass": "no_such_trainer is not importable in this process"}
    assert "  hooked    policy loss" in str(report)
    unregister()


def test_an_unknown_host_is_an_error():
    for function in (register, unregister):
        with pytest.raises(ConfigurationError, match="megatron_lm, verl, nemo_rl, slime, got 'trl'; use one of them"):
            function("trl")


@pytest.mark.parametrize("name", ["verl", "slime"])
def test_the_adapters_of_absent_hosts_say_so(name, monkeypatch):
    monkeypatch.setattr(HostAdapter, "present", property(lambda self: False))
    with pytest.raises(ConfigurationError, match=f"{name} is not importable; install it .examples/{name}/README.md"):
        register(name)


def test_public_names():
    assert megatron_support.register is register
    assert megatron_support.unregister is unregister


def test_importable_does_not_import():
    assert importable("wsgiref.simple_server")
    assert not importable("wsgiref.no_such") and not importable("no_such.module")


def test_a_symbol_of_a_module_that_fails_to_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "fake_host.broken", None)
    with pytest.raises(MissingSymbol, match=r"module fake_host\.broken cannot be imported"):
        symbol("fake_host.broken", "anything")


def test_autoload_registers_the_hosts_that_are_imported_already(host, monkeypatch):
    use(monkeypatch, ALL)
    monkeypatch.delenv("MEGATRON_SUPPORT_HOSTS", raising=False)
    monkeypatch.delitem(sys.modules, "megatron_support.autoload", raising=False)
    monkeypatch.setitem(registry.PACKAGES, "slime", "fake_host")
    autoload = importlib.import_module("megatron_support.autoload")
    monkeypatch.delitem(sys.modules, "megatron_support.autoload")
    assert [report.hooked for report in autoload.reports] == [("slime",)]
    unregister()


def test_autoload_by_name_is_loud_where_the_host_is_absent(monkeypatch, caplog):
    use(monkeypatch, ALL, module="no_such_host")
    monkeypatch.setenv("MEGATRON_SUPPORT_HOSTS", " slime ")
    monkeypatch.delitem(sys.modules, "megatron_support.autoload", raising=False)
    with pytest.raises(ConfigurationError, match="slime must be installed"):
        importlib.import_module("megatron_support.autoload")
    assert "could not register" in caplog.text


def test_autoload_imports_no_host_and_no_torch():
    code = "import sys, megatron_support.autoload as a; print(len(a.reports), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["0", "False"]


def test_doctor_lists_hosts(host, monkeypatch, capsys):
    from megatron_support.__main__ import main

    monkeypatch.setenv("COLUMNS", "160")
    use(monkeypatch, ALL)
    assert main(["doctor"]) == 0
    assert re.search(r"slime +ok +1\.2\.3", capsys.readouterr().out)
    use(monkeypatch, ALL, module="no_such_host")
    main(["doctor"])
    assert re.search(r"slime +not used +not importable\s+-> see its guide", capsys.readouterr().out)
    assert host.function() == "original"


def test_the_hosts_and_their_packages():
    assert HOSTS == ("megatron_lm", "verl", "nemo_rl", "slime")
