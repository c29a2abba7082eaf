"""Requests to a scoring service: several in parallel, with retries, within a deadline and a budget.

Why retries by hand: a wait follows the service's Retry-After or a jittered backoff, and
ends at the deadline of the whole batch or when the budget that all threads share is
spent. With tenacity each of these is a callback, which makes the loop of `Service._ask`
longer. A call costs 10 us more, which no service would notice.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar
from urllib.parse import urlsplit

from megaverl.errors import RewardError
from megaverl.outside import read_json

# Like 500 and above, these statuses may pass when the request is retried.
PASSING = (408, 409, 425, 429)
OURS = {
    401: "the token",
    403: "the token",
    404: "the address, or the model's name",
    405: "the address",
}
LONGEST_WAIT, CACHED = 30.0, 100_000
JOB_HEADER = "X-Megaverl-Job"


class Unanswered(Exception):
    """Raised if a request has no usable answer; gives the reason."""


class Unsupported(Exception):
    """Raised if the service refuses the form of a request (400, 422)."""


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service.

    Attributes:
        url: address that requests are posted to.
        token_env: environment variable with a bearer token.
        timeout_seconds: limit of one attempt.
        retries: further attempts.
        deadline_seconds: limit of one call for all its samples, waits included.
        concurrent: parallel requests.
        budget: requests of this process in the whole run; None: no limit.
        job: name by which a service that several jobs share tells them apart.
    """

    url: str
    token_env: str | None = None
    timeout_seconds: float = 60.0
    retries: int = 5
    deadline_seconds: float = 600.0
    concurrent: int = 16
    budget: int | None = None
    job: str | None = None

    def check(self) -> None:
        """Raise a ValueError for options that cannot be used."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(
                f"url is {self.url!r}; it must begin with http:// or https:// and name a host"
            )
        if parts.username or parts.password:
            raise ValueError(
                "url has a user name or password in it; name a variable with a token in token_env"
            )
        bounds = {
            "timeout_seconds": 1e-9,
            "deadline_seconds": 1e-9,
            "retries": 0,
            "concurrent": 1,
            "budget": 1,
        }
        for name, least in bounds.items():
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value < least
            ):
                bound = f"at least {least:g}" if least in (0, 1) else "above 0"
                raise ValueError(f"{name} is {value!r}; it must be a number, {bound}")
        if self.token_env is not None and not os.environ.get(self.token_env):
            raise ValueError(
                f"token_env: no variable {self.token_env} is set. Run: export {self.token_env}=..."
            )


def check_service(url: str, **options: Any) -> None:
    """Raise a ValueError for wrong service options among `options`."""
    ServiceOptions(
        url,
        **{
            key: value
            for key, value in options.items()
            if key in ServiceOptions.__dataclass_fields__
        },
    ).check()


def with_service_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose `**service` are `ServiceOptions`, and show them in its signature."""
    signature = inspect.signature(function)
    *own_parameters, _ = signature.parameters.values()
    taken = (*signature.parameters, "job")
    option_parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=option.type,
        )
        for option in fields(ServiceOptions)
        if option.name not in taken
    ]
    parameters = [*own_parameters, *option_parameters]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


@dataclass
class Service:
    """Thread-safe client of one service.

    Attributes:
        sent: number of attempts.
        failed: requests without an answer.
        from_cache: requests that were answered from the cache.
        tokens: tokens that the answers report as used.
    """

    options: ServiceOptions
    sent: int = 0
    failed: int = 0
    from_cache: int = 0
    tokens: int = 0
    last_failure: str = ""
    _cache: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slots: threading.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        # Limits the parallel requests of all calls together.
        self._slots = threading.Semaphore(self.options.concurrent)

    _shared: ClassVar[dict[ServiceOptions, Service]] = {}
    _told: ClassVar[dict[str, int]] = {}

    @classmethod
    def shared(cls, options: ServiceOptions) -> Service:
        """Return this process's client with these options. Its cache and budget last for the run."""
        return cls._shared.setdefault(options, cls(options))

    @classmethod
    def known(cls) -> list[Service]:
        """List the clients of this process."""
        return list(cls._shared.values())

    @classmethod
    def spent(cls) -> dict[str, int]:
        """Return metrics of all clients of this process since the last call."""
        before, cls._told = cls._told, cls.costs()
        return {name: count - before.get(name, 0) for name, count in cls._told.items()}

    @classmethod
    def costs(cls) -> dict[str, int]:
        """Return metrics of all clients of this process since its start."""
        names = {
            "requests": "sent",
            "failed_requests": "failed",
            "cached_requests": "from_cache",
            "tokens": "tokens",
        }
        known = cls.known()
        return {
            f"reward/service_{name}": sum(
                getattr(service, attribute) for service in known
            )
            for name, attribute in names.items()
        }

    def ask_all(
        self,
        requests: Sequence[Mapping[str, Any]],
        read: Callable[[Any], Any],
        *,
        instead: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Send all requests and return `read` of each answer, or None without an answer. Equal requests are sent once.

        Args:
            read: converts the answer's JSON; raises ValueError, KeyError, TypeError or IndexError for an unusable
                answer, which is requested again.
            instead: returns another form of a request that the service refuses (400, 422).

        Raises:
            RewardError: the service refuses the token, or does not exist at this address.
        """
        # Imported here, so that only rewards with a service need httpx.
        import httpx

        options = self.options
        deadline = time.monotonic() + options.deadline_seconds
        headers = {}
        if options.token_env is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(options.token_env, '')}"
        if options.job is not None:
            headers[JOB_HEADER] = options.job
        limits = httpx.Limits(max_connections=options.concurrent)
        with httpx.Client(headers=headers, limits=limits, trust_env=False) as client:

            def one(request: Mapping[str, Any]) -> Any:
                try:
                    return self._cached(client, request, read, instead, deadline)
                except Unanswered as error:
                    with self._lock:
                        self.failed += 1
                        self.last_failure = str(error)
                    return None

            # Equal requests of one call are sent once.
            distinct = {_key(request): request for request in requests}
            with ThreadPoolExecutor(
                options.concurrent, thread_name_prefix="service"
            ) as pool:
                answers = dict(
                    zip(distinct, pool.map(one, distinct.values()), strict=True)
                )
        return [answers[_key(request)] for request in requests]

    def _cached(
        self,
        client: Any,
        request: Mapping[str, Any],
        read: Callable[[Any], Any],
        instead: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None,
        deadline: float,
    ) -> Any:
        key = _key(request)
        # Checked under the lock, and asked without it: requests must run in parallel.
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                self.from_cache += 1
                return self._cache[key]
        try:
            answer = self._ask(client, request, read, deadline)
        except Unsupported as error:
            if instead is None:
                raise Unanswered(str(error)) from None
            # The service may not know an option, such as a structured answer.
            try:
                answer = self._ask(client, instead(request), read, deadline)
            except Unsupported as again:
                raise Unanswered(str(again)) from None
        with self._lock:
            self._cache[key] = answer
            # The oldest entries go first.
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return answer

    def _ask(
        self,
        client: Any,
        request: Mapping[str, Any],
        read: Callable[[Any], Any],
        deadline: float,
    ) -> Any:
        """Send one request until it is answered or its attempts are used up."""
        problem = "its time was over before it was sent"
        for attempt in range(self.options.retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # Counted before the request, so that the budget is never exceeded.
            self._spend()
            try:
                # The limit holds over all calls of this process.
                with self._slots:
                    answer = self._post(
                        client, request, min(self.options.timeout_seconds, left)
                    )
                return read(answer)
            except _TryAgain as error:
                problem, wait = str(error), error.wait
            except (ValueError, KeyError, TypeError, IndexError) as error:
                problem, wait = (
                    f"an answer that cannot be read ({type(error).__name__}: {error})",
                    None,
                )
            # Full jitter: requests that failed at the same time are not retried at the
            # same time.
            wait = (
                random.uniform(0, min(0.5 * 2**attempt, LONGEST_WAIT))
                if wait is None
                else wait
            )
            # No wait beyond the deadline, which holds for the whole batch.
            if attempt < self.options.retries and time.monotonic() + wait < deadline:
                time.sleep(wait)
            else:
                break
        raise Unanswered(f"{self.options.url}: {problem}")

    def _post(self, client: Any, request: Mapping[str, Any], timeout: float) -> Any:
        import httpx

        end = time.monotonic() + timeout
        try:
            # Read in parts: httpx's timeout applies to each read, and a server may send
            # a byte a minute. The JSON is ASCII, since a text may hold lone surrogates,
            # which UTF-8 cannot encode.
            sent = {
                "content": json.dumps(request).encode(),
                "headers": {"Content-Type": "application/json"},
            }
            with client.stream(
                "POST", self.options.url, timeout=timeout, **sent
            ) as response:
                parts = []
                for part in response.iter_bytes():
                    parts.append(part)
                    if time.monotonic() > end:
                        raise _TryAgain(f"no whole answer within {timeout:.3g} s")
            body = b"".join(parts)
        except httpx.HTTPError as error:
            raise _TryAgain(f"{type(error).__name__} {error}".strip()) from None
        status = response.status_code
        if status in OURS:
            # Another try would get the same answer, and the user must correct
            # something.
            raise RewardError(
                f"{self.options.url} answers {status} ({response.reason_phrase}): check {OURS[status]}. Response: "
                f"{body[:200].decode('utf-8', 'replace')!r}"
            )
        if status in PASSING or status >= 500:
            raise _TryAgain(
                f"status {status}", _retry_after(response.headers.get("retry-after"))
            )
        if status >= 300:
            raise Unsupported(
                f"{self.options.url}: status {status}: {body[:200].decode('utf-8', 'replace')!r}"
            )
        answer = read_json(body)
        used = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(used, dict) and isinstance(used.get("total_tokens"), int):
            with self._lock:
                self.tokens += used["total_tokens"]
        return answer

    def _spend(self) -> None:
        with self._lock:
            if self.options.budget is not None and self.sent >= self.options.budget:
                raise Unanswered(
                    f"the budget of {self.options.budget} requests is spent"
                )
            self.sent += 1


class _TryAgain(Exception):
    """Raised for a failure that a retry may overcome. `wait` is the service's own wish in seconds."""

    def __init__(self, problem: str, wait: float | None = None) -> None:
        super().__init__(problem)
        self.wait = wait


def _retry_after(text: str | None) -> float | None:
    """Parse the seconds of a Retry-After header; None without one."""
    try:
        return min(max(float(text or ""), 0.0), LONGEST_WAIT)
    except ValueError:
        return None


def _key(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
