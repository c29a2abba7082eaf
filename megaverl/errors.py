"""Errors for the user who must fix them: each names the key, file, row or rank, and what to do."""

# Exit code of a run that was asked to stop (SIGTERM, SIGUSR1) and has saved a
# checkpoint: it can be started again (EX_TEMPFAIL of sysexits.h).
SAVED_AND_LEFT = 75
# Other exit codes of commands besides 0.
FAILED, MISTAKE, INTERRUPTED = 1, 2, 130


class MegaverlError(Exception):
    """Base of all errors that are caused by input, configuration or environment rather than by a bug.

    Commands print its message without a traceback and exit non-zero on every rank.
    """


class ConfigError(MegaverlError):
    """One or more mistakes in the configuration; the message lists all of them."""


class GridError(ConfigError):
    """A parallel grid that does not fit the number of ranks or the model."""


class DataError(MegaverlError):
    """A data set, row, prompt or tokenizer that cannot be used."""


class ModelError(MegaverlError):
    """A model folder that is missing, damaged or of an unsupported architecture."""


class RewardError(MegaverlError):
    """A reward function that is missing, raises, or returns the wrong thing."""


class EpisodeError(MegaverlError):
    """An environment, game or tool that is missing, raises, or answers with the wrong thing."""


class EnvironmentFault(EpisodeError):
    """A fault of an environment, a tool or the network, and not of the policy.

    Examples are a lost connection, a time-out and a process that died. The episode is
    tried again. If it keeps failing, its sample is left out of training
    (`environment.faults`).

    Example:
        class Browser(Environment):
            def step(self, token_ids):
                try:
                    page = self.session.open(self.codec.decode(token_ids))
                except ConnectionError as error:
                    raise EnvironmentFault(f"the browser is gone: {error}") from error
    """


class RolloutError(MegaverlError):
    """A generation engine that refuses a request or returns the wrong thing."""


class HarnessError(MegaverlError):
    """An evaluation harness or a task of it that is missing, fails, or does not end."""


class ReshardError(MegaverlError):
    """Two layouts that do not fit together, or weights that did not arrive."""


class CheckpointError(MegaverlError):
    """A checkpoint that is missing, incomplete or does not fit the run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes have changed since it was written; another one may be intact."""


class TrainingStopped(MegaverlError):
    """The run cannot continue: a non-finite loss, a wrong first reshard, a lost rank."""
