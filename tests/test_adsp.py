"""Workers and parameter server joined over an in-process network: real threads, real queues, no mocks."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from commhooks import adsp
from commhooks.config import Config
from commhooks.core.commit.catalog import CommitOptions
from commhooks.errors import ConfigError, PeerLost, UnsupportedModelError
from commhooks.messengers import QueueNetwork


class ThreadRendezvous:
    """All-gather between the threads of one test."""

    def __init__(self, rank, shared):
        self.rank, self.world_size = rank, shared["barrier"].parties
        self._shared = shared

    def exchange(self, name, value):
        self._shared.setdefault(name, {})[self.rank] = value
        self._shared["barrier"].wait(timeout=20)
        values = [self._shared[name][r] for r in range(self.world_size)]
        self._shared["barrier"].wait(timeout=20)
        return values


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def train(module, optimizer, steps, rank, handle=None):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(16, 4, generator=generator)
        y = (x[:, 0] > 0).long()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        if handle is not None:
            handle.report_loss(loss.item())


class Team:
    """Ranks as threads."""

    def __init__(self, ranks, commit, network, options=None, **settings):
        self.network = network
        self.shared = {"barrier": threading.Barrier(ranks)}
        self.config = Config(commit=commit, **{"timeout_s": 20.0, **settings})
        self.options = options
        self.models = [model() for _ in range(ranks)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in self.models]
        self.handles = [None] * ranks
        self.errors = [None] * ranks

    def attach(self, rank):
        self.handles[rank] = adsp.attach(
            self.models[rank],
            self.optimizers[rank],
            self.network.messenger(rank),
            ThreadRendezvous(rank, self.shared),
            self.config,
            self.options,
        )

    def run(self, work):
        def guarded(rank):
            try:
                work(rank)
            except Exception as error:
                self.errors[rank] = error

        threads = [threading.Thread(target=guarded, args=(r,)) for r in range(len(self.models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=40)
        assert not any(t.is_alive() for t in threads), "a worker hangs"
        return self.errors


@contextmanager
def team(ranks, commit, options=None, **settings):
    with QueueNetwork(ranks) as network:
        yield Team(ranks, commit, network, options, **settings)


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("commit", ["adsp", "adsp-paper", "bsp", "fixed", "ssp", "adacomm"])
@pytest.mark.parametrize("server", ["sharded", "rank0"])
def test_every_policy_trains_and_all_ranks_end_with_the_same_model(commit, server):
    options = CommitOptions(check_period_s=0.05, local_steps=3, staleness=3, trial_s=0.01)
    with team(3, commit, options, commit_server=server, slice_numel=7) as three:

        def work(rank):
            three.attach(rank)
            train(three.models[rank], three.optimizers[rank], 20 + 5 * rank, rank, three.handles[rank])
            three.handles[rank].finish()

        if commit in (
            "bsp",
            "fixed",
            "adacomm",
        ):  # with uneven numbers of steps, who finishes is no longer waited for
            pass
        assert three.run(work) == [None] * 3
        first = flat(three.models[0])
        assert all(torch.equal(first, flat(m)) for m in three.models)
        means = [m[1].running_mean for m in three.models]
        assert all(torch.equal(means[0], other) for other in means)
        stats = three.handles[0].stats()
        assert stats["worker"]["steps"] == 20 and stats["worker"]["commits"] >= 1


def test_bsp_is_the_average_of_all_ranks_steps():
    with team(2, "bsp") as two:
        expected = [model(0), model(0)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in expected]
        for step in range(3):
            before = flat(expected[0])
            for r in (0, 1):
                step_once(expected[r], optimizers[r], 10 * step + r)
            mean = before + sum((flat(m) - before) / 2 for m in expected)
            for m in expected:
                torch.nn.utils.vector_to_parameters(mean.clone(), m.parameters())
        two.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in two.models]

        def work(rank):
            two.attach(rank)
            for step in range(3):
                step_once(two.models[rank], two.optimizers[rank], 10 * step + rank)
            two.handles[rank].finish()

        assert two.run(work) == [None, None]
        assert torch.allclose(flat(two.models[0]), flat(expected[0]), atol=1e-6)


def step_once(module, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator)
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()


def test_a_worker_that_dies_is_not_waited_for_and_commits_agree_on_both_sides():
    options = CommitOptions(check_period_s=0.05, local_steps=2)
    with team(3, "fixed", options, commit_server="rank0") as three:
        died = threading.Event()

        def work(rank):
            three.attach(rank)
            if rank == 2:
                train(three.models[2], three.optimizers[2], 5, 2)
                three.network.kill(2)
                died.set()
                return
            train(three.models[rank], three.optimizers[rank], 30, rank)
            three.handles[rank].flush()
            counted = three.handles[0].committer.on_server(three.handles[0].committer.server.commits)
            three.shared.setdefault("agree", []).append(
                counted[rank] == three.handles[rank].stats()["worker"]["commits"] if rank == 0 else True
            )
            three.handles[rank].finish()

        assert three.run(work) == [None] * 3
        assert three.shared["agree"] == [True, True]
        assert torch.equal(flat(three.models[0]), flat(three.models[1]))
        assert three.handles[0].stats()["scheduler"]["lost"] == [2]


def test_a_replacement_pulls_the_current_model_and_goes_on():
    options = CommitOptions(check_period_s=0.05, local_steps=2)
    with team(3, "fixed", options, commit_server="rank0") as three:
        replaced = threading.Event()

        def work(rank):
            three.attach(rank)
            if rank < 2:
                train(three.models[rank], three.optimizers[rank], 20, rank)
                replaced.wait(timeout=30)
                train(three.models[rank], three.optimizers[rank], 20, rank)
            else:
                train(three.models[2], three.optimizers[2], 6, 2)
                three.network.kill(2)
                fresh = model(seed=5)  # it need not know anything of the model so far
                optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
                again = adsp.rejoin(fresh, optimizer, three.network.messenger(2), 3, three.config, 1, options)
                three.models[2], three.handles[2] = fresh, again
                replaced.set()
                train(fresh, optimizer, 10, 2)
            three.handles[rank].finish()

        assert three.run(work) == [None] * 3
        assert all(torch.equal(flat(three.models[0]), flat(m)) for m in three.models)
        assert three.handles[2].stats()["worker"]["commits"] >= 5


def test_the_loss_of_a_shard_holder_is_a_named_error_on_all_and_a_restart_goes_on_from_the_checkpoint(
    tmp_path,
):
    path = str(tmp_path / "shards")
    options = CommitOptions(check_period_s=0.02, commit_rate=4)
    with team(3, "adsp", options, commit_checkpoint=path, commit_server="sharded", slice_numel=7) as three:

        def work(rank):
            three.attach(rank)
            train(three.models[rank], three.optimizers[rank], 60, rank)
            if rank == 2:
                three.network.kill(2)
                return
            while True:
                train(three.models[rank], three.optimizers[rank], 1, rank)

        errors = three.run(work)
        assert all(isinstance(e, PeerLost) and "COMMHOOKS_COMMIT_CHECKPOINT" in str(e) for e in errors[:2])
        assert "parameter server" in str(errors[0])
    with team(3, "adsp", options, commit_checkpoint=path, commit_server="sharded", slice_numel=7) as again:

        def restart(rank):
            fresh = flat(again.models[0]).clone()
            again.attach(rank)
            again.shared[f"start{rank}"] = flat(again.models[rank])
            assert not torch.equal(again.shared[f"start{rank}"], fresh)
            again.handles[rank].finish()

        assert again.run(restart) == [None] * 3
        assert all(torch.equal(again.shared["start0"], again.shared[f"start{r}"]) for r in (1, 2))
    with team(2, "adsp", options, commit_checkpoint=path, slice_numel=7) as other:
        errors = other.run(other.attach)
        assert any(isinstance(e, ConfigError) and "another model" in str(e) for e in errors)


def test_a_commit_cut_off_and_sent_again_is_added_once():
    options = CommitOptions(check_period_s=1000.0, commit_rate=1)
    with team(2, "adsp", options, commit_server="rank0") as two:
        two.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in two.models]

        def work(rank):
            two.attach(rank)

        assert two.run(work) == [None, None]
        worker = two.handles[1].committer.worker
        server = two.handles[0].committer.server
        start = two.handles[0].committer.on_server(server.snapshot)
        step_once(two.models[1], two.optimizers[1], 1)
        before = worker._base.copy()
        moved = flat(two.models[1]).numpy() - before
        for lossy in (True, False):
            two.network.cut(0, 1)
            command = worker._core.commit_now(worker._clock(), "test") if lossy else None
            if command is not None:
                worker._send(command)
            else:
                worker.resend()
            worker.resend()
            two.network.mend(0, 1, lossy=lossy)
        worker.flush()
        now = two.handles[0].committer.on_server(server.snapshot)
        added = np.concatenate([now[i] - start[i] for i in sorted(now)])
        assert np.allclose(added, moved / 2, atol=1e-6)


def test_refusals_name_what_to_do():
    with QueueNetwork(1) as network:
        rendezvous = ThreadRendezvous(0, {"barrier": threading.Barrier(1)})
        module = model()
        with pytest.raises(ConfigError, match="needs the optimizer"):
            adsp.attach(module, None, network.messenger(0), rendezvous, Config(commit="adsp"))
        with pytest.raises(UnsupportedModelError, match="pass the optimizer itself"):
            adsp.attach(module, object(), network.messenger(0), rendezvous, Config(commit="adsp"))
        module.register_parameter("z", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
        with pytest.raises(UnsupportedModelError, match="z is torch.complex64"):
            adsp.attach(module, torch.optim.SGD(module.parameters(), lr=1), network.messenger(0), rendezvous,
                        Config(commit="adsp"))  # fmt: skip
        with pytest.raises(ConfigError, match="exclude each other"):
            adsp.register(module, None, Config(commit="adsp", overlap="forward"))


def test_a_shard_holder_that_leaves_after_its_last_answer_fails_nobody():
    for _ in range(5):
        with team(2, "adsp", CommitOptions(check_period_s=0.02), commit_server="rank0") as two:

            def work(rank, two=two):
                two.attach(rank)
                train(two.models[rank], two.optimizers[rank], 5, rank)
                two.handles[rank].finish()
                if rank == 0:
                    two.network.kill(0)

            assert two.run(work) == [None, None]


def test_a_rate_beyond_the_bandwidth_is_refused_with_the_largest_possible_one():
    fast = {"topology": "nic:0.1,0.1", "commit_rate": 1000.0, "check_period_s": 1.0}
    with team(2, "adsp", None, **fast) as two:
        errors = two.run(two.attach)
    assert all(isinstance(e, ConfigError) and "largest possible rate is" in str(e) for e in errors)


def test_models_that_start_differently_are_refused():
    with team(2, "adsp") as two:
        two.models[1] = model(seed=9)
        errors = two.run(two.attach)
    assert all(isinstance(e, ConfigError) and "start from different parameters" in str(e) for e in errors)


def test_channels_last_parameters_travel():
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    parameters = adsp.FlatParameters(adsp.trainable(conv))
    values = parameters.read()
    for piece in adsp.cut(parameters.numels, 10):
        start, end = parameters.span(piece)
        parameters.write(piece, values[start:end] + 1)
    assert np.allclose(parameters.read(), values + 1)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
