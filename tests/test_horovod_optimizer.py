"""Real Horovod ranks: the numbers of plain Horovod and of one process on the whole batch, and errors that name their cause.

Each of the module's jobs runs many cases in one launch; a test looks at one case of one job.
"""

from __future__ import annotations

import functools
import tempfile

import pytest

from tests.horovod_ranks import need_horovod, run_cases

need_horovod()

SAME_NUMBERS = {  # case -> how far from plain Horovod and from one process it may be
    "sgd_50_steps": 1e-6,
    "adam_50_steps": 1e-6,
    "two_passes": 1e-6,
    "groups_by_number": 1e-6,
    "groups_by_list": 1e-6,
    "compression_fp16": 2e-2,
    "predivide": 1e-6,
    "summed": 1e-6,
    "clipping_with_ceremony": 1e-6,
    "clipping_without_ceremony": 1e-6,
    "scheduler_after": 1e-6,
    "scheduler_before": 1e-6,
    "process_set_of_two": 1e-6,
    "bf16": None,
    "closure": 1e-6,
    "commits": None,
    "ranks_use_different_layers": 1e-6,
    "frozen_and_unfrozen": None,
    "sparse_embedding": 1e-5,
    "join_with_uneven_batches": 1e-6,
    "forward_overlap": 1e-6,
    "forward_overlap_adam_clipped_scheduled": 1e-6,
    "forward_overlap_two_passes": 1e-6,
    "grad_scaler": None,
    "step_after_odd_passes": 1e-6,
    "two_optimizers_same_names": None,
    "odd_passes_over_two_epochs": None,
}
TRUE = [
    "state_is_kept_and_shared",
    "broadcast_optimizer_state",
    "zero_grad_takes_set_to_none",
    "step_hooks_fire_once",
]
REFUSALS = [
    "too_many_passes",
    "bad_arguments",
    "forward_overlap_refusals",
    "changed_gradient",
    "other_model_on_a_rank",
]
OTHER_WAY = ["sgd_50_steps", "adam_50_steps", "two_passes", "groups_by_number", "compression_fp16", "predivide", "summed",
             "process_set_of_two", "bf16", "ranks_use_different_layers", "sparse_embedding", "changed_gradient",
             "join_with_uneven_batches", "forward_overlap", "forward_overlap_two_passes"]  # fmt: skip
MANY_RANKS = ["sgd_50_steps", "adam_50_steps", "two_passes", "groups_by_number", "predivide", "clipping_with_ceremony",
              "process_set_of_two", "ranks_use_different_layers", "bf16", "join_with_uneven_batches"]  # fmt: skip
JOBS = {
    "2 ranks native": (2, "native", OTHER_WAY),
    "2 ranks trees": (2, "trees", [*SAME_NUMBERS, *TRUE, *REFUSALS]),
    "4 ranks trees": (4, "trees", MANY_RANKS),
    "4 ranks native": (4, "native", ["sgd_50_steps", "process_set_of_two"]),
    "2 ranks auto": (2, "auto", ["sgd_50_steps", "bf16"]),
}


@functools.cache
def results_of(job):
    ranks, schedule, cases = JOBS[job]
    with tempfile.TemporaryDirectory() as folder:
        return run_cases(ranks, cases, folder, {"COMMHOOKS_SCHEDULE": schedule})


def results(job, case):
    found = [rank[case] for rank in results_of(job)]
    for rank, result in enumerate(found):
        assert "traceback" not in result, f"rank {rank}:\n{result['traceback']}"
    return found


def jobs_with(cases):
    return [
        pytest.param(job, case, id=f"{job}-{case}") for job in JOBS for case in JOBS[job][2] if case in cases
    ]


@pytest.mark.parametrize(("job", "case"), jobs_with(SAME_NUMBERS))
def test_same_numbers_on_every_rank_and_as_the_others(job, case):
    members = [result for result in results(job, case) if "outside" not in result]
    assert len(members) > 1
    assert len({result["digest"] for result in members}) == 1, "ranks end bit-identical"
    for result in members:
        assert result.get("again", result["digest"]) == result["digest"], "a second run gives the same bits"
        assert result.get("ok", True), result
        for other in ("plain", "alone"):
            assert result.get(other, 0.0) <= (SAME_NUMBERS[case] or 0.0), (other, result)


@pytest.mark.parametrize("job", [job for job in JOBS if JOBS[job][0] == 4])
def test_ranks_outside_the_process_set_train_alone(job):
    assert [result.get("outside") for result in results(job, "process_set_of_two")] == [
        None,
        None,
        True,
        True,
    ]


@pytest.mark.parametrize("job", ["2 ranks trees"])
def test_frozen_parameters_stay_and_unfrozen_ones_are_averaged(job):
    for result in results(job, "frozen_and_unfrozen"):
        assert result["frozen_kept"] and result["moved"]


@pytest.mark.parametrize(("job", "case"), jobs_with(TRUE))
def test_it_behaves_as_the_users_optimizer(job, case):
    for result in results(job, case):
        assert result["ok"], result


@pytest.mark.parametrize("job", ["2 ranks trees"])
@pytest.mark.parametrize("case", ["too_many_passes", "odd_passes_over_two_epochs"])
def test_too_many_passes_name_parameter_and_optimizer(job, case):
    for result in results(job, case):
        assert result["refusal"].startswith("ConfigError: optimizer SGD #")
        assert "parameter third.bias got gradient number 3" in result["refusal"]
        assert "backward_passes_per_step is 2" in result["refusal"] and "zero_grad()" in result["refusal"]


@pytest.mark.parametrize("job", ["2 ranks native", "2 ranks trees"])
def test_an_edit_is_never_lost(job):
    for result in results(job, "changed_gradient"):
        assert "UnsupportedModelError: optimizer SGD #" in result["refusal"]
        assert "the gradient of left.weight was changed" in result["refusal"]
        assert "synchronize()" in result["refusal"]


BAD = {
    "incomplete": "1 of its 6 parameters aren't in named_parameters: param_groups[0]['params'][0] of shape [40, 12]",
    "duplicate": "named_parameters has the name first.weight more than once",
    "not_pairs": "pass model.named_parameters()",
    "adasum": "op=hvd.Adasum needs a Horovod with MPI",
    "predivide": "gradient_predivide_factor=2.0 goes with op=hvd.Average only",
    "passes": "backward_passes_per_step=0: expected a whole number of at least 1",
    "group_twice": "a parameter is in more than one of groups",
    "group_names": "groups must consist of parameters",
    "lbfgs": "LBFGS decides by the local loss",
    "twice": "SGD is a distributed optimizer already",
    "config": "unknown setting shedule; the nearest known one is schedule",
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments_are_named(argument):
    for result in results("2 ranks trees", "bad_arguments"):
        assert BAD[argument] in result[argument]


def test_overlap_with_the_next_forward_refuses_by_name():
    for result in results("2 ranks trees", "forward_overlap_refusals"):
        assert "no gradient came for right.weight, right.bias in this step" in result["missing"]
        assert "doesn't go with op= other than hvd.Average" in result["sum"]
        assert "doesn't go with compression=" in result["compression"]
        assert "overlap=forward needs the model; pass model=" in result["no_model"]


@pytest.mark.parametrize("job", ["2 ranks trees"])
def test_another_model_on_a_rank_is_named_on_both(job):
    for result in results(job, "other_model_on_a_rank"):
        assert "Mismatch: optimizer SGD #" in result["refusal"]
        assert (
            "parameter 1.weight is float32 [4, 8] on rank 0 and float32 [5, 8] on rank 1" in result["refusal"]
        )
