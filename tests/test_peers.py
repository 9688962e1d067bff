"""torch's own tests over Lamina: what is substituted, and how two runs are judged together."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tasks.matrix.record import Result
from tasks.peers.judge import VERDICTS, Reason, judge, reasons
from tasks.peers.running import SUITES, files_of, linked, page
from tasks.peers.substitute import internal_tests, substitute, wraps

ROOT = Path(__file__).resolve().parents[1]


def body(text: str, *, lamina: bool = True) -> str:
    """The rewritten text without the imports that every file gets."""
    lines = substitute(text, lamina=lamina).splitlines()
    return "\n".join(line for line in lines if not line.startswith("import peer_"))


REWRITTEN = {
    "x = model.cuda()": "x = model.cpu()",
    "x = torch.ones(2, device='cuda')": "x = torch.ones(2, device='cpu')",
    "x = y.to(0)": "x = y.to('cpu')",
    "x = torch.ones(2, device=rank)": "x = torch.ones(2, device=peer_device.without_index(rank))",
    "x = y.to(self.rank)": "x = y.to(peer_device.without_index(self.rank))",
    "x = torch.device('cuda:0')": "x = torch.device('cpu')",
    "n = torch.cuda.device_count()": "n = peer_device.device_count()",
    "init('nccl')": "init('gloo')",
    "x = DistTestCases.backend_feature['cuda']": "x = DistTestCases.backend_feature['cuda']",
    "from torch.distributed.fsdp import fully_shard": "from peer_lamina import fully_shard",
    "from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy": (
        "from peer_lamina import fully_shard\n"
        "from torch.distributed.fsdp import MixedPrecisionPolicy"
    ),
    "from torch.distributed.tensor import DTensor as D": "from peer_lamina import DTensor as D",
    "m = torch.nn.parallel.DistributedDataParallel(n)": (
        "m = peer_lamina.DistributedDataParallel(n)"
    ),
    "from .near import x": "from .near import x",
    "print('cuda is a word in this sentence')": "print('cuda is a word in this sentence')",
}


@pytest.mark.parametrize("text", REWRITTEN)
def test_names_of_torch_and_of_gpus_are_substituted(text):
    assert body(text) == REWRITTEN[text]


def test_the_run_over_torch_itself_keeps_torchs_names():
    text = "from torch.distributed.fsdp import fully_shard\nx = fully_shard(y.cuda())"
    assert body(text, lamina=False) == text.replace("cuda", "cpu")
    assert "peer_lamina" not in substitute(text, lamina=False)


def test_a_docstring_and_imports_of_the_future_stay_first():
    lines = substitute('"""Doc."""\nfrom __future__ import annotations\nx = 1\n', lamina=True)
    tree = ast.parse(lines)
    assert ast.get_docstring(tree) == "Doc."
    assert [type(node) for node in tree.body[1:4]] == [ast.ImportFrom, ast.Import, ast.Import]


def test_tests_of_private_modules_are_told():
    text = (
        "from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup\n"
        "class TestA:\n"
        "    def test_inside(self):\n        FSDPParamGroup()\n"
        "    def test_outside(self):\n        pass\n"
    )
    assert internal_tests(text) == {"TestA::test_inside"}


WRAPPING = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard"


def test_files_that_wrap_nothing_in_what_lamina_has_are_told():
    assert wraps(WRAPPING)
    assert wraps("from torch.nn.parallel import DistributedDataParallel as DDP")
    assert wraps("x = torch.nn.parallel.DistributedDataParallel(y)")
    assert not wraps("from torch.distributed.fsdp.fully_sharded_data_parallel import FSDP")
    assert not wraps("from torch.distributed.tensor import DTensor")


FRAME = 'File "/x/packages/fsdp/src/lamina/fsdp/a.py", line 3, in f\n    {source}\n'
PASSED = Result("t", "passed")
ENDINGS = {
    "an assertion": ("AssertionError: 1 != 2", "breaks"),
    "a name that is not there": ("AttributeError: 'X' object has no attribute 'state'", "absent"),
    "an argument": ("TypeError: f() got an unexpected keyword argument 'g'", "absent"),
    "a refusal": (FRAME.format(source="raise ValueError(text)") + "ValueError: do that", "refused"),
    "a crash within": (FRAME.format(source="return a[3]") + "IndexError: list index", "breaks"),
    "a refusal of torch": (
        'File "/x/torch/a.py", line 3, in f\n    raise ValueError(text)\nValueError: no',
        "breaks",
    ),
    "other words": ('AssertionError: "must be" does not match "is not"', "differs"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_failure_is_judged_by_how_it_ends(name):
    text, verdict = ENDINGS[name]
    assert judge("A::t", PASSED, Result("t", "failed", reason=text), []).verdict == verdict


def test_a_test_that_torch_itself_fails_here_is_not_judged():
    for torch in (
        None,
        Result("t", "failed", reason="RuntimeError: no GPU"),
        Result("t", "skipped"),
    ):
        assert judge("A::t", torch, PASSED, []).verdict == "not judged"
    assert judge("A::t", PASSED, PASSED, [], "it is of torch itself").verdict == "not judged"
    assert judge("A::t", PASSED, PASSED, []).verdict == "holds"
    assert judge("A::t", PASSED, None, []).verdict == "breaks"


def test_a_reason_that_was_written_down_decides_unless_the_test_holds():
    known = [Reason("A::*", "differs", "by design", "fsdp.md#x")]
    failed = Result("t", "failed", reason="AssertionError: 1 != 2")
    judgement = judge("A::t", PASSED, failed, known)
    assert (judgement.verdict, judgement.link) == ("differs", "fsdp.md#x")
    assert judge("A::t", PASSED, PASSED, known).verdict == "holds"
    assert judge("B::t", PASSED, failed, known).verdict == "breaks"
    assert linked(judgement) == "by design ([docs](../fsdp.md#x))"


def test_every_reason_has_a_verdict_that_needs_one_and_a_page_that_is_there():
    assert reasons()
    for reason in reasons():
        assert reason.verdict in ("refused", "absent", "differs")
        assert reason.why
        assert (ROOT / "docs" / reason.link.partition("#")[0]).exists()


def test_a_checkout_without_the_tests_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is it a source tree of PyTorch"):
        files_of(tmp_path, "fsdp2")


def test_files_of_each_suite_are_found(tmp_path):
    names = {
        "test/distributed/_composable/fsdp/test_fully_shard_init.py": "",
        "test/distributed/checkpoint/test_uses.py": WRAPPING,
        "test/distributed/checkpoint/test_other.py": "import fully_sharded_data_parallel",
    }
    for name, text in names.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {suite: [file.name for file in files_of(tmp_path, suite)] for suite in SUITES}
    assert found == {
        "fsdp2": ["test_fully_shard_init"],
        "ddp": ["distributed_test"],
        "dcp": ["test_uses"],
    }


def test_the_record_counts_each_verdict_and_lists_what_does_not_hold():
    judged = [judge("A::good", PASSED, PASSED, []), judge("A::bad", PASSED, None, [])]
    text = page({"fsdp2": judged}, "PyTorch 2.6.0", 2)
    numbers = {"holds": 1, "breaks": 1}
    row = " | ".join(str(numbers.get(verdict, 0)) for verdict in VERDICTS)
    assert f"| fsdp2 | 2 | {row} |" in text
    assert "- `A::bad`:" in text
    assert "A::good" not in text


PLANTED = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_fsdp import FSDPTest

class TestPlanted(FSDPTest):
    def test_trains(self):
        model = torch.nn.Linear(4, 4).cuda()
        fully_shard(model)
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        self.assertIsNotNone(model.weight.grad)

    def test_state(self):
        model = fully_shard(torch.nn.Linear(4, 4))
        self.assertIsNotNone(fully_shard.state(model))

    def test_nothing(self):
        self.assertTrue(True)
"""


@pytest.mark.slow
def test_a_planted_checkout_is_run_both_ways_and_judged(tmp_path, monkeypatch):
    pytest.importorskip("expecttest", reason="what torch's own tests need: requirements/peers.txt")
    from tasks.peers.running import TestFile, judge_file

    path = tmp_path / "test_planted.py"
    path.write_text(PLANTED)
    judged = judge_file(TestFile("fsdp2", path), tmp_path / "run", ranks=2)
    verdicts = {judgement.test: judgement.verdict for judgement in judged}
    assert verdicts == {
        "TestPlanted::test_trains": "holds",
        "TestPlanted::test_state": "absent",
        "TestPlanted::test_nothing": "not judged",
    }
