"""One episode, from reset to receipt: the operations that both ways of driving it use.

What always holds: the policy sandbox is confirmed absent before the verifier exists; only the artifact leaves it; a
score is committed only after both are confirmed absent and within the deadline; after an infrastructure failure the
driver ends the episode; exactly one receipt is written, by `_end`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from orchestrator.errors import (
    ArtifactMissing,
    ArtifactTooLarge,
    AuthenticationFailed,
    CommandTooLarge,
    CreateRejected,
    EpisodeAborted,
    EpisodeClosed,
    InfrastructureLost,
    OutcomeUnknown,
    ProviderError,
    SandboxGone,
)
from orchestrator.ledger import Ledger
from orchestrator.provider import CreateRequest, File, Provider, Sandbox
from orchestrator.records import EpisodeSpec, Operation, Receipt
from orchestrator.rows import Lease
from orchestrator.settings import ANSWER_SECONDS, Budgets
from orchestrator.transcripts import Transcript
from orchestrator.vocabulary import Outcome, Phase, Role, allocation_id
from workers.allocator import Allocator, Owned
from workers.grading import Grade, grade
from workers.session import NotRun, PolicySession, StepResult
from workers.timeline import Timeline

_NUL = "error: a command cannot contain a NUL character; nothing was run"


@dataclass(frozen=True)
class Parts:
    """What an executor works with; built by the job, replaced by small fakes in tests."""

    ledger: Ledger
    provider: Provider
    allocator: Allocator
    session: PolicySession
    """A session on the worker's Terminus server, connecting already; the first creation attempt takes it."""
    open_session: Callable[[], PolicySession]
    """A new one, for each further attempt: a session whose reset failed may be over."""
    transcript: Transcript
    farm_tag: str
    worker_id: str
    check: Callable[[], None]
    allow: Callable[[float], None]
    """Tells the lease keeper how long the phase that begins may last."""


class Executor:
    """Runs one leased episode. Call `reset`, then `terminal` any number of times, then `submit` or another ending.

    Each may raise EpisodeAborted: then only `abort` may follow.
    """

    def __init__(self, spec: EpisodeSpec, lease: Lease, budgets: Budgets, parts: Parts, timeline: Timeline) -> None:
        self.receipt: Receipt | None = None
        self.timeline = timeline
        self._spec = spec
        self._lease = lease
        self._budgets = budgets
        self._parts = parts
        self._sizes: dict[str, int] = {}
        self._operations: list[Operation] = []
        self._policy: Owned | None = None
        self._sandbox: Sandbox | None = None
        self._session = parts.session
        self._attempts = 0

    def reset(self) -> str:
        """Create the policy sandbox, make sure that it answers, upload the starter files; the ready message."""
        budgets = self._budgets
        self.timeline.start()
        self._parts.allow(budgets.deadline_seconds + budgets.cleanup_seconds)
        with self._guarded("reset"):
            with self.timeline.timed(Phase.CREATE):
                request = self._request(Role.POLICY)
                self._policy, _ = self._parts.allocator.create(
                    Role.POLICY,
                    request,
                    lambda body: (self._fresh_session().reset(body), None),
                    wait_seconds=self.timeline.bound(budgets.deadline_seconds),
                    longest_seconds=budgets.longest_seconds(Role.POLICY),
                )
            with self.timeline.timed(Phase.SETUP):
                self._sandbox = self._attach(self._policy, budgets.policy_lifetime_seconds)
                self._upload(self._sandbox, self._spec.task.sandbox_files(), "setup")
        self.timeline.open_window()
        return "The sandbox is ready. Use terminal(command=...) to work and submit() when the task is done."

    def terminal(self, command: str) -> StepResult:
        """Run one command in the policy sandbox.

        Raises InfrastructureLost when sandbox, server or transport is gone, EpisodeClosed after the end.
        """
        self._raise_if_over()
        size = len(command.encode())
        if size > self._budgets.command_bytes:
            raise CommandTooLarge(f"a command is at most {self._budgets.command_bytes} bytes, got {size}: write a file")
        self._parts.transcript.add("terminal", command)
        if "\0" in command:  # sent, the sandbox would refuse it, and a policy could abort its episode at will
            self._parts.transcript.add("observation", _NUL)
            return NotRun(_NUL)
        with self._guarded("terminal") as done:
            self.timeline.bound(self._budgets.command_seconds)
            step = self._session.terminal(command)
            size = len(step.text.encode("utf-8", "replace"))
            done(exit_code=step.exit_code, timed_out=step.timed_out, size_bytes=size)
        self._sizes["observations"] = self._sizes.get("observations", 0) + size
        self._parts.transcript.add("observation", step.text)
        return step

    def submit(self) -> Receipt:
        """Export the artifact, delete the policy sandbox, verify and grade it elsewhere, end the episode."""
        self._raise_if_over()
        self.timeline.close_window()
        self._parts.transcript.add("submit", "")
        with self._guarded("submit"):
            try:
                with self.timeline.timed(Phase.EXPORT):
                    artifact = self._export()
            except (ArtifactMissing, ArtifactTooLarge) as error:
                verdict = Grade(Outcome.ARTIFACT_MISSING, str(error))
            else:
                self._dispose_policy()
                with self.timeline.timed(Phase.VERIFY):
                    verdict = self._verify(artifact)
        return self._end(verdict.outcome, verdict.detail)

    def not_submitted(self) -> Receipt:
        """The reward was asked for without a submission: zero, if the sandbox is healthy."""
        return self._end_healthy(Outcome.NOT_SUBMITTED, "the episode ended without a submission")

    def window_exhausted(self) -> Receipt:
        """The policy window is over: zero, if the sandbox is healthy."""
        window = self._budgets.policy_window_seconds
        return self._end_healthy(Outcome.WINDOW_EXHAUSTED, f"the policy window of {window:g} s is over")

    def abort(self, error: EpisodeAborted) -> Receipt:
        """End the episode without a score."""
        return self._end(error.outcome, error.detail)

    def _fresh_session(self) -> PolicySession:
        if self._attempts:
            self._session.close()
            self._session = self._parts.open_session()
        self._attempts += 1
        return self._session

    def _end_healthy(self, outcome: Outcome, detail: str) -> Receipt:
        self._raise_if_over()
        self.timeline.close_window()
        with self._guarded("health"):
            self.timeline.bound(self._budgets.transfer_seconds)
            if self._sandbox is None:
                raise SandboxGone("no policy sandbox")
            self._sandbox.probe()
        return self._end(outcome, detail)

    def leave(self) -> None:
        """Give the server's place back; its sandbox is gone already, or the allocator's to delete."""
        with suppress(ProviderError):
            self._session.close()

    def idle(self) -> None:
        """Call it while nothing is asked: raises when the lease is lost, the trainer gone, the episode cancelled."""
        self._parts.check()  # before anything is written: the episode may be another's by now
        self._parts.transcript.settle()

    def _raise_if_over(self) -> None:
        if self.receipt is not None:
            raise EpisodeClosed(f"the episode has ended: {self.receipt.outcome}")
        self._parts.check()

    def _attach(self, owned: Owned, lifetime_seconds: int) -> Sandbox:
        def attach() -> Sandbox:
            left = lifetime_seconds - int(time.monotonic() - owned.created)  # so that it cannot outlive its reservation
            return self._parts.provider.attach(owned.sandbox_id, lifetime_seconds=max(1, left))

        sandbox = self._parts.allocator.patiently(attach)
        sandbox.probe()
        self._note_size(owned)
        return sandbox

    def _note_size(self, owned: Owned) -> None:
        if not self._parts.allocator.note_size(owned):
            raise SandboxGone(f"{owned.sandbox_id} does not exist right after its creation")
        if not owned.affordable:
            size = f"{owned.row.vcpus} vCPU and {owned.row.memory_mb} MiB"
            raise EpisodeAborted(Outcome.BUDGET_EXHAUSTED, f"a sandbox of {size} is more than the budget can bear")

    def _upload(self, sandbox: Sandbox, files: Mapping[str, str], size_name: str) -> None:
        total = 0
        for path, text in files.items():
            data = text.encode()
            total += len(data)
            sandbox.write(path, data, timeout_seconds=self.timeline.bound(self._budgets.transfer_seconds))
        self._sizes[size_name] = total

    def _export(self) -> File:
        if self._sandbox is None:
            raise SandboxGone("no policy sandbox")
        artifact = self._sandbox.read(
            self._spec.task.artifact,
            limit_bytes=self._budgets.transfer_bytes,
            timeout_seconds=self.timeline.bound(self._budgets.transfer_seconds),
        )
        self._sizes["artifact"] = len(artifact.data)
        return artifact

    def _dispose_policy(self) -> None:
        with self.timeline.timed(Phase.CLEANUP):
            if self._policy is not None and not self._parts.allocator.dispose(self._policy):
                raise EpisodeAborted(
                    Outcome.CLEANUP_UNRESOLVED,
                    f"policy sandbox {self._policy.sandbox_id} could not be confirmed absent; no verifier was made",
                )

    def _verify(self, artifact: File) -> Grade:
        budgets, task = self._budgets, self._spec.task

        def send(body: CreateRequest) -> tuple[str, Sandbox]:
            sandbox = self._parts.provider.create(body)
            return sandbox.sandbox_id, sandbox

        owned, sandbox = self._parts.allocator.create(
            Role.VERIFIER,
            self._request(Role.VERIFIER),
            send,
            wait_seconds=self.timeline.bound(budgets.deadline_seconds),
            longest_seconds=budgets.longest_seconds(Role.VERIFIER),
        )
        sandbox.probe()
        self._note_size(owned)
        self._upload(sandbox, task.verifier_files(), "verification")
        transfer = self.timeline.bound(budgets.transfer_seconds)
        sandbox.write(task.artifact, artifact.data, timeout_seconds=transfer)
        # Files are written without their modes: the command restores what it may need, at no request of its own.
        restore = f"chmod a+x -- {shlex.quote(task.artifact)}\n" if artifact.executable else ""
        run = sandbox.run(
            restore + task.command,
            timeout_seconds=self.timeline.bound(budgets.verifier_limit_seconds),
            output_limit_bytes=budgets.transfer_bytes,
            response_seconds=max(budgets.verifier_command_seconds, budgets.command_seconds + ANSWER_SECONDS),
        )
        if not run.started:
            raise OutcomeUnknown("the verifier could not start the command")  # nobody's doing: it is fresh
        self._sizes["verifier_stdout"] = len(run.stdout)
        return grade(task.grader, task.expected, run)

    def _request(self, role: Role) -> CreateRequest:
        spec, budgets = self._spec, self._budgets
        allocation = allocation_id(spec.episode_id, self._lease.attempt, role)
        verifier = role is Role.VERIFIER
        return CreateRequest(
            allocation_id=allocation,
            template=spec.template,
            lifetime_seconds=budgets.verifier_lifetime_seconds if verifier else budgets.first_lifetime_seconds,
            allow_internet_access=spec.task.network and not verifier,
            metadata={
                "farm": self._parts.farm_tag,
                "episode": spec.episode_id,
                "allocation": allocation,
                "role": str(role),
            },
            envs=dict(spec.task.envs),
        )

    @contextmanager
    def _guarded(self, name: str) -> Iterator[Callable[..., None]]:
        """Trace one operation and turn whatever the boundary raised into an InfrastructureLost."""
        began = time.monotonic()
        facts: dict[str, object] = {}
        ok = False
        try:
            yield facts.update
            ok = True
        except ProviderError as error:
            raise InfrastructureLost(_outcome_of(error, name), str(error)) from error
        finally:
            seconds = round(time.monotonic() - began, 6)
            self._operations.append(Operation.model_validate({"name": name, "seconds": seconds, "ok": ok, **facts}))

    def _end(self, outcome: Outcome, detail: str | None) -> Receipt:
        """Dispose of everything, then write the one receipt; an unresolved cleanup or a late score changes it."""
        if self.receipt is not None:
            return self.receipt
        self.timeline.close_window()
        self._parts.allow(self._budgets.cleanup_seconds)
        with self.timeline.timed(Phase.CLEANUP):
            unresolved = self._parts.allocator.dispose_all()
        if unresolved and outcome.scored:
            outcome, detail = Outcome.CLEANUP_UNRESOLVED, f"not confirmed absent: {', '.join(unresolved)}"
        elif outcome.scored and self.timeline.left() <= 0:
            outcome, detail = Outcome.DEADLINE, f"the episode's {self._budgets.deadline_seconds:g} s are over"
        receipt = self._receipt(outcome, detail)
        self._parts.transcript.flush()
        self._parts.ledger.commit(receipt, self._lease.token)
        self.receipt = receipt
        self.leave()
        return receipt

    def _receipt(self, outcome: Outcome, detail: str | None) -> Receipt:
        spec = self._spec
        return Receipt(
            episode_id=spec.episode_id,
            attempt=self._lease.attempt,
            run_id=spec.run_id,
            group_id=spec.group_id,
            task_id=spec.task.id,
            task_digest=spec.task.digest(),
            template=spec.template,
            drive=spec.drive,
            outcome=outcome,
            reward=outcome.score,
            detail=detail,
            worker_id=self._parts.worker_id,
            queued_at=self._lease.queued_at,
            started_at=self._lease.taken_at,
            finished_at=self._lease.now(),
            phases={phase: round(seconds, 6) for phase, seconds in self.timeline.seconds.items()},
            sizes=self._sizes,
            operations=tuple(self._operations),
            allocations=tuple(self._parts.allocator.intended),
        )


def _outcome_of(error: ProviderError, operation: str) -> Outcome:
    if isinstance(error, SandboxGone):
        return Outcome.SANDBOX_LOST
    never_made = operation in ("reset", "submit") and isinstance(error, AuthenticationFailed | CreateRejected)
    if never_made or (operation == "reset" and type(error) is ProviderError):  # asked again, it would be the same
        return Outcome.SETUP_FAILED
    return Outcome.TRANSPORT
