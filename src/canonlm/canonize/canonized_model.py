"""Canonized models as transformers sees them: their class, and their folders.

In memory the class is a subclass of the host's, with the same name, and the configuration is the host's own. A folder
has `model_type: canon_host`, the host's configuration one level down, and a field at which the plain class fails.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from canonlm.canon.layer import CanonLayer
from canonlm.canon.sites import check_saved_with_code, parse
from canonlm.canonize import canon_cache
from canonlm.canonize.derived import Derived, derived
from canonlm.canonize.install import install
from canonlm.canonize.placement import place
from canonlm.core.bundle import flat, flat_modules, write_modules
from canonlm.core.errors import InvalidSetting, expected
from canonlm.core.saved import NOT_ITS_OWN, check_fits, check_labels, check_loaded, read_settings, reason_of

MODEL_TYPE = "canon_host"
NOT_PUSHED = (
    'False: save_pretrained("NAME", self_contained=True), then huggingface_hub.upload_folder(repo_id="NAME", '
    'folder_path="NAME")'
)
ENTRIES = {
    "AutoConfig": "canonlm.canonize.canonized_model.CanonHostConfig",
    "AutoModelForCausalLM": "canonlm.canonize.canonized_model.CanonHostForCausalLM",
}
"""Attributes that transformers' Auto classes need, for a folder with its own code."""

IS_OURS = __name__ == "canonlm.canonize.canonized_model"
"""Whether this is canonlm's own module, not the copy in a folder."""


class CanonizedModel(Derived):
    """A mixin, placed before the class of a host."""

    canon_attributes = ("canon_sites",)
    canon_sites = ""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        host: Any = self
        install(host, place(host, parse(self.canon_sites), self.canon_sites))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the host's, but strict: ValueError unless the folder holds a model with these Canon layers, and exactly
        its weights."""
        place, wants_info = pretrained_model_name_or_path, kwargs.pop("output_loading_info", False)
        if place is not None:
            folder = Path(place, kwargs.get("subfolder") or "")
            local = folder.is_dir()
            saved = read_settings(folder) if local else PreTrainedConfig.get_config_dict(place, **_of_hub(kwargs))[0]
            if saved.get("model_type") != MODEL_TYPE:
                what = "the folder of a canonized model (load the host with its own class, then canonize it)"
                raise expected(f"{place}: model_type", what, saved.get("model_type"))
            if (sites := saved.get("sites")) != cls.canon_sites:
                raise expected(f"{place}: sites", f'"{cls.canon_sites}"', sites)
            config = kwargs.get("config")
            if not isinstance(config, PreTrainedConfig) or isinstance(config, CanonHostConfig):
                kwargs["config"] = config = host_config(saved, cls.config_class)[0]  # type: ignore[attr-defined]
            if local and kwargs.get("state_dict") is None:
                check_fits(folder, config.to_dict(), lambda: cls(copy.deepcopy(config)), kwargs.get("variant"))
        model, info = super().from_pretrained(place, *args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        check_loaded(str(place), model, info, bool(kwargs.get("ignore_mismatched_sizes")))
        for part in model.modules():
            if isinstance(part, CanonLayer) and part.frozen:
                part.requires_grad_(False)  # loading replaces parameters with trainable ones
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, self_contained: bool = False, **kwargs: Any) -> None:
        """As the host's. With `self_contained` the folder includes our code, and `from_pretrained(…,
        trust_remote_code=True)` loads it where canonlm is not installed."""
        if kwargs.get("push_to_hub"):
            raise expected("push_to_hub", NOT_PUSHED, True)
        if self_contained:
            check_saved_with_code(parse(self.canon_sites))
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        file = Path(save_directory) / "config.json"
        if not file.exists():  # written by another process
            return
        host = json.loads(file.read_text())
        if (kind := host.pop("model_type", None)) != MODEL_TYPE:
            saved = saved_form(self.canon_sites, kind, host)
            if self_contained or not IS_OURS:
                _write_code(save_directory)
                saved["auto_map"] = {auto: flat(path) for auto, path in ENTRIES.items()}
            file.write_text(json.dumps(saved, indent=2) + "\n")

    @torch.no_grad()
    def initialize_weights(self) -> None:
        super().initialize_weights()  # type: ignore[misc]
        host: Any = self
        for layer in (part for part in host.modules() if isinstance(part, CanonLayer)):
            for name, parameter in layer.named_parameters(recurse=False):
                if not getattr(parameter, "_is_hf_initialized", False):  # not loaded
                    layer.fill(name, parameter)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        what = "generate: continuous batching has no place for the states of Canon layers"
        raise expected("generate_batch", what, type(self).__name__)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> Any:
        made = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        for cache in model_kwargs.values():
            if isinstance(cache, Cache):
                canon_cache.adopt(cache)
                if getattr(generation_config, "is_assistant", False):
                    cache.activate_past_recording()
        return made


def canonized_class(model_class: type, sites: str) -> Any:
    return derived(CanonizedModel, model_class, canon_sites=sites)


class CanonHostConfig(PreTrainedConfig):
    """The configuration in the folder of a canonized model, for `AutoModelForCausalLM`. `host` is the host's own, whose
    fields, such as `vocab_size`, this one also has."""

    model_type = MODEL_TYPE
    auto_map: ClassVar[dict[str, str]] = {}
    sites: str = ""
    host: Any = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """kwargs: other values for fields of the host. ValueError for what is not the configuration of a host."""
        wants_unused = kwargs.pop("return_unused_kwargs", False)
        parse(sites := config_dict.get("sites", ""))
        host, unused = host_config(config_dict, **kwargs)
        made: Any = cls(sites=sites, host=host, architectures=[CanonHostForCausalLM.__name__])
        made.dtype, made._attn_implementation = host.dtype, host._attn_implementation  # the dtype may be "auto"
        return (made, unused) if wants_unused else made

    def to_dict(self) -> dict[str, Any]:
        host = {} if self.host is None else self.host.to_diff_dict()
        return saved_form(self.sites, host.pop("model_type", ""), host)

    to_diff_dict = to_dict

    def __getattr__(self, name: str) -> Any:
        host = vars(self).get("host")
        if host is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(host, name)


class CanonHostForCausalLM(PreTrainedModel):
    """Not a model: `AutoModelForCausalLM` uses it to find the class of the model in a folder."""

    config_class = CanonHostConfig

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.pop("config", None)
        if not isinstance(config, CanonHostConfig):
            config = CanonHostConfig.from_pretrained(pretrained_model_name_or_path, **_of_hub(kwargs))
        return cls.class_of(config).from_pretrained(pretrained_model_name_or_path, *args, config=config.host, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return cls.class_of(config)._from_config(config.host, **kwargs)

    @classmethod
    def class_of(cls, config: CanonHostConfig) -> Any:
        named = next((getattr(transformers, str(name), None) for name in config.host.architectures or []), None)
        model_class: Any = named if isinstance(named, type) and issubclass(named, PreTrainedModel) else None
        if model_class is None or model_class.config_class is not type(config.host):
            if type(config.host) not in AutoModelForCausalLM._model_mapping:
                raise expected("host_type", "a causal model of transformers", config.host.model_type)
            model_class = AutoModelForCausalLM._model_mapping[type(config.host)]
        return canonized_class(model_class, config.sites)


def saved_form(sites: str, host_type: str, host: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json. host: the host's configuration."""
    text: dict[str, Any] = next(
        (host[key] for key in ("text_config", "decoder") if isinstance(host.get(key), dict)), {}
    )
    size = host.get("vocab_size", text.get("vocab_size"))
    return {
        "architectures": [CanonHostForCausalLM.__name__],
        "model_type": MODEL_TYPE,
        "sites": sites,
        **({} if size is None else {"vocab_size": size}),
        "transformers_weights": NOT_ITS_OWN,
        "host_type": host_type,
        "host": host,
    }


def host_config(saved: dict[str, Any], config_class: Any = None, **changes: Any) -> Any:
    """The host's configuration, from that of a folder, and those of `changes` that are not its fields.
    config_class: of a host that may not be in transformers."""
    kind, host = saved.get("host_type"), saved.get("host")
    if not isinstance(host, dict) or not host:
        raise expected("host", "an object, the host's configuration", host)
    if config_class is not None:
        if kind != config_class.model_type:
            raise expected("host_type", f'"{config_class.model_type}"', kind)
    elif not isinstance(kind, str) or kind not in CONFIG_MAPPING or kind in (MODEL_TYPE, "canonlm"):
        raise expected("host_type", "a model type of transformers", kind)
    else:
        config_class = CONFIG_MAPPING[kind]
    names = host.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise expected("host.architectures", "a list of names", names)
    check_labels({"host": host})
    try:
        return config_class.from_dict(copy.deepcopy(host), return_unused_kwargs=True, **changes)
    except Exception as error:  # the library's own checks raise anything
        raise InvalidSetting("host", f"host: not a configuration of {kind} ({reason_of(error)})") from None


def _write_code(folder: Any) -> None:
    if IS_OURS:
        write_modules(flat_modules(ENTRIES.values()), folder)
    else:
        folder_of_code = Path(__file__).parent
        for file in [*folder_of_code.glob("[!_]*.py"), *folder_of_code.glob("LICENSE")]:
            shutil.copy(file, folder)


def _of_hub(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of `from_pretrained` about the source."""
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}


AutoModelForCausalLM.register(CanonHostConfig, CanonHostForCausalLM, exist_ok=True)
