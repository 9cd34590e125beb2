"""Every error a user can meet. Each message says what was given, what was expected and what to do.

FaserError
├── ConfigError          an option of LLM(), the command line or a policy string
├── MissingPackage       a package of an extra that is not installed
├── ModelError           a model that is missing, broken or does not fit its partner
│   └── UnsupportedModel a model FASER knows and refuses, by the name of the feature
├── InvalidRequest       a prompt or a sampling parameter
│   └── RequestTooLong   more tokens than the model or the KV cache can hold
├── EngineError          a request that could not be finished: its engine failed or was closed
├── MoveError            the draft's memory could not be given to the KV cache, or the draft not loaded again
└── RemoteError          another server that cannot be reached or does not speak the OpenAI API
"""


class FaserError(Exception):
    """The base of every error that FASER raises on purpose."""


class ConfigError(FaserError, ValueError):
    """An option has a value that cannot work."""


class MissingPackage(FaserError, ImportError):
    """A part of FASER needs a package that is not installed."""


class ModelError(FaserError):
    """A model cannot be loaded or paired."""


class UnsupportedModel(ModelError):
    """A model uses a feature FASER does not implement."""


class InvalidRequest(FaserError, ValueError):
    """A request cannot be served as it is; other requests are not affected."""


class RequestTooLong(InvalidRequest):
    """A request has more tokens than the model or the KV cache can hold."""


class EngineError(FaserError, RuntimeError):
    """The engine failed or was closed while the request was open."""


class MoveError(FaserError):
    """Memory could not be moved between the draft and the KV cache. The engine goes on without speculation."""


class RemoteError(FaserError):
    """Another server cannot be reached or understood."""
