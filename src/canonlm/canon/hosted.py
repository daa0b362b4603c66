"""Canonized models as transformers sees them: their class, and their folders.

In memory the class is a subclass of the host's, with the same name, and the configuration is the host's own. A folder
has `model_type: canon_host` and the host's configuration one level down, so that the plain class refuses it.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from canonlm.canon import states
from canonlm.canon.installing import install
from canonlm.canon.layer import CanonLayer
from canonlm.canon.placing import place
from canonlm.canon.sites import parse
from canonlm.errors import InvalidSetting, expected
from canonlm.flat_code import flat, flat_modules, write_modules

MODEL_TYPE = "canon_host"
ENTRIES = {
    "AutoConfig": "canonlm.canon.hosted.CanonHostConfig",
    "AutoModelForCausalLM": "canonlm.canon.hosted.CanonHostForCausalLM",
}
"""Attributes that transformers' Auto classes need, for a folder with its own code."""

IS_OURS = __name__ == "canonlm.canon.hosted"
"""Whether this is canonlm's own module, not the copy in a folder."""

NOT_ITS_OWN = "a canonized model's: import canonlm, then AutoModelForCausalLM.from_pretrained"


class CanonizedModel:
    """A mixin, placed before the class of a host."""

    canon_sites = ""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        host: Any = self
        install(host, place(host, parse(self.canon_sites), self.canon_sites))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the host's. ValueError unless the folder holds a model with these Canon layers."""
        place, wants_info = pretrained_model_name_or_path, kwargs.pop("output_loading_info", False)
        if place is not None:
            saved, _ = PreTrainedConfig.get_config_dict(place, **_of_hub(kwargs))
            if saved.get("model_type") != MODEL_TYPE:
                what = "the folder of a canonized model (load the host with its own class, then canonize it)"
                raise expected(f"{place}: model_type", what, saved.get("model_type"))
            if saved["sites"] != cls.canon_sites:
                raise expected(f"{place}: sites", f'"{cls.canon_sites}"', saved["sites"])
            if not isinstance(kwargs.get("config"), PreTrainedConfig) or isinstance(kwargs["config"], CanonHostConfig):
                kwargs["config"] = host_config(saved, getattr(cls, "config_class", None))
        model, info = super().from_pretrained(place, *args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        for key, what in (("missing_keys", "lacks weights of"), ("unexpected_keys", "has weights of other")):
            if names := sorted(name for name in info[key] if ".canon_" in name):
                raise InvalidSetting("model", f"{place}: {what} Canon layers, such as {names[0]}")
        for part in model.modules():
            if isinstance(part, CanonLayer) and part.frozen:
                part.requires_grad_(False)  # loading replaces parameters with trainable ones
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, self_contained: bool = False, **kwargs: Any) -> None:
        """As the host's. With `self_contained` the folder includes our code, and `from_pretrained(…,
        trust_remote_code=True)` loads it where canonlm is not installed."""
        if kwargs.get("push_to_hub"):
            raise expected("push_to_hub", "a saved folder first (then: hf upload)", True)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        file = Path(save_directory) / "config.json"
        if not file.exists():  # written by another process
            return
        host = json.loads(file.read_text())
        if host.get("model_type") != MODEL_TYPE:
            saved = {"architectures": host.get("architectures"), "model_type": MODEL_TYPE, "sites": self.canon_sites}
            # Every configuration checks its vocab_size: a class without Canon layers fails there and shows this text.
            saved |= {"vocab_size": NOT_ITS_OWN, "host_type": host.pop("model_type"), "host": host}
            if self_contained or not IS_OURS:
                _write_code(save_directory)
                saved["auto_map"] = {auto: flat(path) for auto, path in ENTRIES.items()}
            file.write_text(json.dumps(saved, indent=2) + "\n")

    def __reduce__(self) -> Any:  # pickle cannot find a class created at run time
        return _new_model, (host_class(type(self)), self.canon_sites), vars(self)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> Any:
        made = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        for cache in model_kwargs.values():
            if isinstance(cache, Cache):
                states.adopt(cache)
                if getattr(generation_config, "is_assistant", False):
                    cache.activate_past_recording()
        return made


@functools.cache
def canonized_class(model_class: type, sites: str) -> Any:
    # Name and module too: the library looks up a class by them, and takes classes of other modules for remote code.
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(model_class.__name__, (CanonizedModel, model_class), {**names, "canon_sites": sites})


def _new_model(model_class: Any, sites: str) -> Any:
    made = canonized_class(model_class, sites)
    return made.__new__(made)


def host_class(canonized: type) -> Any:
    return canonized.__bases__[1]


class CanonHostConfig(PreTrainedConfig):
    """The configuration in the folder of a canonized model, for `AutoModelForCausalLM`."""

    model_type = MODEL_TYPE
    sites: str = ""
    host_type: str = ""
    host: dict | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict(
            {key: config_dict[key] for key in ("sites", "host_type", "host") if key in config_dict}, **kwargs
        )


class CanonHostForCausalLM(PreTrainedModel):
    """Not a model: `AutoModelForCausalLM` uses it to find the class of the model in a folder."""

    config_class = CanonHostConfig

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.pop("config", None)
        if not isinstance(config, CanonHostConfig):
            config = CanonHostConfig.from_pretrained(pretrained_model_name_or_path, **_of_hub(kwargs))
        if config._attn_implementation is not None:
            kwargs.setdefault("attn_implementation", config._attn_implementation)
        return cls.class_of(config).from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return cls.class_of(config)._from_config(host_config(vars(config)), **kwargs)

    @classmethod
    def class_of(cls, config: CanonHostConfig) -> Any:
        parse(config.sites)
        host = host_config(vars(config))
        names = (config.host or {}).get("architectures") or []
        named = getattr(transformers, str(names[0]), None) if names else None
        model_class: Any = named if isinstance(named, type) and issubclass(named, PreTrainedModel) else None
        if model_class is None or model_class.config_class is not type(host):
            if type(host) not in AutoModelForCausalLM._model_mapping:
                raise expected("host_type", "a causal model of transformers", host.model_type)
            model_class = AutoModelForCausalLM._model_mapping[type(host)]
        return canonized_class(model_class, config.sites)


def host_config(saved: dict[str, Any], config_class: Any = None) -> Any:
    """The host's configuration, from that of a folder. config_class: of a host that may not be in transformers."""
    kind: Any = saved.get("host_type")
    if not isinstance(host := saved.get("host"), dict):
        raise expected("host", "an object, the host's configuration", host)
    if kind != getattr(config_class, "model_type", None):
        if kind not in CONFIG_MAPPING or kind in (MODEL_TYPE, "canonlm"):
            raise expected("host_type", "a model type of transformers", kind)
        config_class = CONFIG_MAPPING[kind]
    return config_class.from_dict(dict(host))


def _write_code(folder: Any) -> None:
    if IS_OURS:
        write_modules(flat_modules(ENTRIES.values()), folder)
    else:
        for file in Path(__file__).parent.glob("[!_]*.py"):
            shutil.copy(file, folder)


def _of_hub(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of `from_pretrained` about the source."""
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}


AutoModelForCausalLM.register(CanonHostConfig, CanonHostForCausalLM, exist_ok=True)
