"""A case as a script that anybody can run, who has torch and Lamina."""

from __future__ import annotations

from pathlib import Path

from fuzz import places
from fuzz.case import Case, program_of
from fuzz.judge import NARROW, ROUNDING, Verdict, tolerance_of

FUTURE = "from __future__ import annotations\n"
MAIN = """

RANKS, TOLERANCE, NARROW = {ranks}, {tolerance}, {narrow}


def main():
    if "RANK" not in os.environ:
        words = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        words += [f"--nproc-per-node={{RANKS}}", __file__]
        environment = {{"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **os.environ}}
        sys.exit(subprocess.call([sys.executable, *words], env=environment))
    from lamina.mesh import init_distributed

    with init_distributed(backend="gloo") as runtime, tempfile.TemporaryDirectory() as directory:
        rank, world = runtime.rank, runtime.world_size
        names = [directory]
        torch.distributed.broadcast_object_list(names)

        def mesh(kind, replicas):
            return None if kind == "none" else make_mesh(kind, replicas, world)

        found = Ranks(rank, world, mesh, Path(names[0])).start(program)
        expected, _ = in_one_process(program, world, SUMS)
        for line in differences(expected[rank], found, TOLERANCE, NARROW):
            print(f"rank {{rank}}: {{line}}")
        print(f"rank {{rank}} has compared {{len(found)}} records with one process", flush=True)
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
"""


def script_of(case: Case, verdict: Verdict, original: str = "") -> str:
    """The script's text: the oracle, the program, and who starts both."""
    exact = verdict.outcome == "bits"
    tolerance = 0.0 if exact else max(tolerance_of(case, exact=False), ROUNDING)
    made_from = f", shrunk from case {original}" if original else ""
    head = f'"""{case.name}{made_from}: {verdict.outcome}.\n\n{_quoted(verdict.detail)}\n"""\n\n'
    imports = "import os\nimport subprocess\nimport sys\nimport tempfile\n\n"
    oracle = Path(places.__file__).read_text().partition(FUTURE)[2]
    program = program_of(case).replace(FUTURE, "")
    main = MAIN.format(ranks=case.ranks, tolerance=tolerance, narrow=tolerance == NARROW)
    return f"{head}{FUTURE}\n{imports}{oracle}\n\n# -- the case {'-' * 88}\n\n{program}{main}"


def _quoted(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")[:2000]
