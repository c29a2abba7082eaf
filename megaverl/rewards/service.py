"""Requests to a service that scores: several at once, again where one fails, and never beyond a time or a budget."""

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

PASSING = (408, 409, 425, 429)  # and 500 and above: the same request may succeed later
OURS = {401: "the token", 403: "the token", 404: "the address, or the model's name", 405: "the address"}
LONGEST_WAIT, CACHED = 30.0, 100_000
JOB_HEADER = "X-Megaverl-Job"


class Unanswered(Exception):
    """No usable answer to one request; says why."""


class Unsupported(Exception):
    """The service refuses the request as it is made (400, 422)."""


@dataclass(frozen=True)
class ServiceOptions:
    """url: where requests are posted. token_env: the environment variable that holds a bearer token.

    timeout_seconds: of one attempt. retries: further attempts. deadline_seconds: of one call for all of its samples,
    waits included. concurrent: requests at once. budget: requests of this process in the whole run; None: any number.
    job: a name by which a service that several jobs share tells them apart.
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
        """Raise a ValueError for what cannot be used."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url is {self.url!r}; it must begin with http:// or https:// and name a host")
        if parts.username or parts.password:
            raise ValueError("url has a user name or password in it; name a variable with a token in token_env")
        bounds = {"timeout_seconds": 1e-9, "deadline_seconds": 1e-9, "retries": 0, "concurrent": 1, "budget": 1}
        for name, least in bounds.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < least):
                bound = "at least 1" if least == 1 else "at least 0" if least == 0 else "above 0"
                raise ValueError(f"{name} is {value!r}; it must be a number, {bound}")
        if self.token_env is not None and not os.environ.get(self.token_env):
            raise ValueError(f"token_env: no variable {self.token_env} is set. Run: export {self.token_env}=...")


def check_service(url: str, **options: Any) -> None:
    """Raise a ValueError for what cannot be used of those options that are a service's."""
    ServiceOptions(
        url, **{key: value for key, value in options.items() if key in ServiceOptions.__dataclass_fields__}
    ).check()


def with_service_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: `**service` are `ServiceOptions` by name; the function's signature says which."""
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    taken = (*signature.parameters, "job")
    others = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(ServiceOptions)
        if each.name not in taken
    ]
    function.__signature__ = signature.replace(parameters=[*own, *others])  # type: ignore[attr-defined]
    return function


@dataclass
class Service:
    """A client of one service; safe to call from several threads.

    Attributes:
        sent, failed: attempts, and requests without an answer. from_cache: those that were not sent. tokens: that
            answers say they have cost.
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
        self._slots = threading.Semaphore(self.options.concurrent)  # of all calls together

    _shared: ClassVar[dict[ServiceOptions, Service]] = {}
    _told: ClassVar[dict[str, int]] = {}

    @classmethod
    def shared(cls, options: ServiceOptions) -> Service:
        """The one of this process with these options: its cache and its budget last for the run."""
        return cls._shared.setdefault(options, cls(options))

    @classmethod
    def known(cls) -> list[Service]:
        """Those of this process."""
        return list(cls._shared.values())

    @classmethod
    def spent(cls) -> dict[str, int]:
        """Metrics: of all of this process, since the last call."""
        before, cls._told = cls._told, cls.costs()
        return {name: count - before.get(name, 0) for name, count in cls._told.items()}

    @classmethod
    def costs(cls) -> dict[str, int]:
        """Metrics: of all of this process, since it began."""
        names = {"requests": "sent", "failed_requests": "failed", "cached_requests": "from_cache", "tokens": "tokens"}
        known = cls.known()
        return {f"reward/service_{name}": sum(getattr(each, own) for each in known) for name, own in names.items()}

    def ask_all(
        self,
        requests: Sequence[Mapping[str, Any]],
        read: Callable[[Any], Any],
        *,
        instead: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """What `read` makes of the answer to each request; None where there is no answer.

        The same request is answered from the cache.

        Args:
            read: given the answer's JSON; raises ValueError, KeyError, TypeError or IndexError for one that cannot be
                used, which is asked again.
            instead: another form of a request that the service refuses (400, 422).

        Raises:
            RewardError: the service refuses the token, or is not there under this address.
        """
        import httpx  # where a reward needs it

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

            distinct = {_key(request): request for request in requests}  # the same in one call are asked once
            with ThreadPoolExecutor(options.concurrent, thread_name_prefix="service") as pool:
                answers = dict(zip(distinct, pool.map(one, distinct.values()), strict=True))
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
            try:
                answer = self._ask(client, instead(request), read, deadline)
            except Unsupported as again:
                raise Unanswered(str(again)) from None
        with self._lock:
            self._cache[key] = answer
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return answer

    def _ask(self, client: Any, request: Mapping[str, Any], read: Callable[[Any], Any], deadline: float) -> Any:
        """One request, until it is answered."""
        problem = "its time was over before it was sent"
        for attempt in range(self.options.retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._spend()
            try:
                with self._slots:
                    answer = self._post(client, request, min(self.options.timeout_seconds, left))
                return read(answer)
            except _TryAgain as error:
                problem, wait = str(error), error.wait
            except (ValueError, KeyError, TypeError, IndexError) as error:
                problem, wait = f"an answer that cannot be read ({type(error).__name__}: {error})", None
            # full jitter: many that failed together do not come back together
            wait = random.uniform(0, min(0.5 * 2**attempt, LONGEST_WAIT)) if wait is None else wait
            if attempt < self.options.retries and time.monotonic() + wait < deadline:
                time.sleep(wait)
            else:
                break
        raise Unanswered(f"{self.options.url}: {problem}")

    def _post(self, client: Any, request: Mapping[str, Any], timeout: float) -> Any:
        import httpx

        end = time.monotonic() + timeout
        try:
            # by parts: httpx's timeout is of each read, and a server may send a byte a minute
            # ASCII: a text may hold what UTF-8 cannot encode
            sent = {"content": json.dumps(request).encode(), "headers": {"Content-Type": "application/json"}}
            with client.stream("POST", self.options.url, timeout=timeout, **sent) as response:
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
            raise RewardError(
                f"{self.options.url} answers {status} ({response.reason_phrase}): see to {OURS[status]}. It says: "
                f"{body[:200].decode('utf-8', 'replace')!r}"
            )
        if status in PASSING or status >= 500:
            raise _TryAgain(f"status {status}", _retry_after(response.headers.get("retry-after")))
        if status >= 300:
            raise Unsupported(f"{self.options.url}: status {status}: {body[:200].decode('utf-8', 'replace')!r}")
        answer = read_json(body)
        used = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(used, dict) and isinstance(used.get("total_tokens"), int):
            with self._lock:
                self.tokens += used["total_tokens"]
        return answer

    def _spend(self) -> None:
        with self._lock:
            if self.options.budget is not None and self.sent >= self.options.budget:
                raise Unanswered(f"the budget of {self.options.budget} requests is spent")
            self.sent += 1


class _TryAgain(Exception):
    def __init__(self, problem: str, wait: float | None = None) -> None:
        super().__init__(problem)
        self.wait = wait


def _retry_after(text: str | None) -> float | None:
    """Seconds, where the service names them."""
    try:
        return min(max(float(text or ""), 0.0), LONGEST_WAIT)
    except ValueError:
        return None


def _key(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
