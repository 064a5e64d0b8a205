"""A model on the disk: seen by the controller without its weights, loaded by each stage as far as it needs them.

Rules of this file:

* The controller reads the config, and makes the model on the meta device. It never holds a weight.
* Each stage makes the model on the meta device once more, leaves out what is absent, and lets transformers load the
  rest: its loader reads files lazily, and knows renamed keys, fused experts, GGUF and tied weights better than anybody.
* A weight that isn't in the files is an error, never a random number.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import io
import json
import os
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal, cast

import attrs
import torch
from torch import Tensor, nn

from stageflow._frames import StageInfo
from stageflow.errors import PartitionError
from stageflow.partition._excerpt import excerpt, retire
from stageflow.partition._needs import Needs
from stageflow.partition._tensors import within

__all__ = ["Checkpoint", "Filler", "Loader", "aliases_of", "reading_gguf_once", "silence"]


@attrs.frozen
class Checkpoint:
    """A model on the disk, given to ``Pipeline.launch`` instead of a module: each stage loads its own piece of it.

        async with Pipeline.launch(Checkpoint("llama-3-70b"), pp=4) as pipe:
            y = await pipe(input_ids=ids)

    The controller reads the config and never holds the weights. With ``build``, keys are looked up in safetensors files by
    the names that parameters have in the built module.

    Raises:
        PartitionError: nothing there that is known, or transformers, safetensors or gguf isn't installed.
    """

    path: str | os.PathLike[str]
    """A directory as transformers saves it (``config.json`` and safetensors, in one file or sharded); a ``.gguf`` file, or a
    directory with one; with ``build``, a ``.safetensors`` file or a directory of them."""
    dtype: torch.dtype | Literal["auto"] = "auto"
    """Of the loaded weights. ``"auto"``: as the config says, else as they were saved; of a GGUF file, float32."""
    build: Callable[[], nn.Module] | None = None
    """Makes the module; for one that isn't of transformers. Run here on the meta device; each stage is sent its piece of
    that, and fills it."""

    # ---- in the controller ----------------------------------------------------------------------------------------------

    def files(self) -> tuple[Path, str | None]:
        """The directory, and the GGUF file in it if it is one."""
        place = Path(self.path).expanduser()
        if place.is_file() and place.suffix == ".gguf":
            return place.parent, place.name
        if place.is_dir():
            if (place / "config.json").exists():
                return place, None
            found = sorted(file.name for file in place.glob("*.gguf"))
            if len(found) == 1:
                return place, found[0]
        raise PartitionError(
            "A Checkpoint is a directory with a config.json as transformers saves it, or a .gguf file: found "
            f"{'neither in' if place.exists() else 'nothing at'} {str(place)!r}. Change path."
        )

    def skeleton(self) -> nn.Module:
        """The model on the meta device. Of transformers, a config alone will do: ``path`` may be a ``.json`` file."""
        if self.build is not None:
            _need("safetensors")
            with torch.device("meta"):
                module = self.build()
            _compute_buffers(module, self.build)
            return module if self.dtype == "auto" else module.to(self.dtype)
        return skeleton_of(self.config(), self.dtype)

    def config(self) -> Any:
        """The config, of transformers' own class."""
        alone = Path(self.path).expanduser()
        directory, gguf = (alone, None) if alone.suffix == ".json" and alone.is_file() else self.files()
        transformers = _transformers("transformers", *(["gguf"] if gguf else []))
        extra = {"gguf_file": gguf} if gguf else {}
        try:
            with silence(), reading_gguf_once() if gguf else contextlib.nullcontext():
                return transformers.AutoConfig.from_pretrained(directory, **extra)
        except Exception as error:
            raise PartitionError(
                f"A Checkpoint has a config that transformers knows: found that it can't read the one in "
                f"{str(directory)!r}, {type(error).__name__}: {error}. Change path, or give build."
            ) from error

    def target(self, skeleton: nn.Module, needs: Needs, *, deep: bool) -> Loader:
        """What a stage is to run, to have its module."""
        directory, gguf = self.files()
        tied = cast("dict[str, str]", getattr(skeleton, "all_tied_weights_keys", None) or {})
        dtype = next(one.dtype for one in skeleton.parameters())
        held = {id(one): one.nbytes for name in needs.present for one in skeleton.get_submodule(name).parameters()}
        return Loader(str(directory), gguf, type(skeleton).__name__, dtype, needs, deep, tied, sum(held.values()))


def _compute_buffers(module: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Give values to buffers that are in no state dict, so in no file: those of a module that is built for real.

    Of that one, parameters go to the meta device one by one as they are made; it isn't taken itself, since this unties them.
    """
    saved = set(module.state_dict())
    computed = [name for name, _ in module.named_buffers() if name not in saved]
    if computed:
        _need("accelerate")
        accelerate: Any = importlib.import_module("accelerate")
        with accelerate.init_empty_weights(include_buffers=False):
            real = build()
        for name in computed:
            parent, _, own = name.rpartition(".")
            module.get_submodule(parent).register_buffer(own, real.get_buffer(name), persistent=False)


def skeleton_of(config: Any, dtype: torch.dtype | Literal["auto"] = "auto") -> nn.Module:
    """The model of a config, on the meta device."""
    transformers = _transformers("transformers")
    names: list[str] = getattr(config, "architectures", None) or []
    family = getattr(transformers, names[0], None) if names else None
    if family is None:
        known = transformers.AutoModelForCausalLM._model_mapping
        family = known[type(config)] if type(config) in known else transformers.AutoModel._model_mapping[type(config)]
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        return family._from_config(config, dtype=dtype).eval()  # as from_pretrained gives it


def _transformers(*packages: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers on import: what is asked for is on the disk
    _need(*packages)
    return importlib.import_module("transformers")


def _need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise PartitionError(f"A Checkpoint is read by {package}, which isn't installed. Install stageflow[hf].")


@contextlib.contextmanager
def silence() -> Generator[None]:
    """Nothing is said of what transformers imports and loads: progress bars, and keys that belong to other stages."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging: Any = importlib.import_module("transformers.utils.logging")
        level, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:  # this may be the user's own program
            logging.set_verbosity(level)
            if shows_progress:
                logging.enable_progress_bar()


@contextlib.contextmanager
def reading_gguf_once() -> Generator[None]:
    """Make transformers load a GGUF file in half the time: 6 s rather than 15 for SmolLM2.

    It reads the whole file three times, for tokenizer, config and weights, makes the table of names once for each module,
    and all that is so many small objects that the garbage collector has a third as much to do as the rest.
    """
    gguf: Any = importlib.import_module("gguf")
    slow = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = map(functools.cache, slow)
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = slow
        if collecting:
            gc.enable()


_OWN = ("_modules", "_parameters", "_buffers", "_is_hf_initialized")
"""What a model takes over from its excerpt."""


# ---- in a stage ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Loader:
    """``build(stage)`` of a model of transformers: loads the piece of one stage."""

    directory: str
    gguf: str | None
    family: str
    dtype: torch.dtype
    needs: Needs
    deep: bool
    tied: dict[str, str]
    """Names of parameters, each with the one whose value it has."""
    nbytes: int
    """Of all that it loads."""
    _made: list[Any] = attrs.field(factory=list[Any], init=False, eq=False)

    def loaded_bytes(self) -> int:
        """Bytes that are there by now; may be called from another thread."""
        if not self._made:
            return 0
        return sum(one.nbytes for one in [*self._made[0].parameters()] if not one.is_meta)

    def __call__(self, _info: StageInfo) -> nn.Module:
        """Load it."""
        transformers = _transformers("transformers")
        family: Any = getattr(transformers, self.family)
        helpers = self._helpers()
        needs = attrs.evolve(
            self.needs,
            present=self.needs.present.union(helpers),
            for_shape=tuple(name for name in self.needs.for_shape if name not in helpers),
        )
        made = self._made

        def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
            family.__init__(self_, *args, **kwargs)
            made.append(excerpt(self_, needs, deep=self.deep))
            of = made[0].excerpt_()
            _leave_alone(of, needs)
            vars(self_).update({name: vars(of)[name] for name in _OWN if name in vars(of)})
            kept = {name for name, _ in of.named_parameters(remove_duplicate=False)}
            tied: dict[str, str] = getattr(self_, "all_tied_weights_keys", None) or {}
            self_.all_tied_weights_keys = {one: other for one, other in tied.items() if {one, other} <= kept}

        names = {"__init__": __init__, "__module__": family.__module__, "__qualname__": family.__qualname__}
        pruned: Any = type(family.__name__, (family,), names)
        with silence(), reading_gguf_once() if self.gguf else contextlib.nullcontext():
            extra = {"gguf_file": self.gguf} if self.gguf else {}
            config = transformers.AutoConfig.from_pretrained(self.directory, **extra)
            model, report = pruned.from_pretrained(
                self.directory, config=config, dtype=self.dtype, output_loading_info=True, **extra
            )
        model.__class__ = family
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"A stage's weights are all in the files: found none for {', '.join(missing[:5])}"
                f"{' and others' if len(missing) > 5 else ''} in {self.directory}"
            )
        stage = made[0]
        stage.adopt(model)
        for name in helpers:
            retire(stage, name, called=name in self.needs.for_shape)
        return stage

    def _helpers(self) -> list[str]:
        """Modules that aren't this stage's, but whose tensors the files have and its own are tied to."""
        found: dict[str, None] = {}
        for target, source in self.tied.items():
            if self._is_here(target) and not self._is_here(source):
                found.update((name, None) for name in (*self.needs.glue, *self.needs.uncalled) if within(source, name))
        return list(found)

    def _is_here(self, parameter: str) -> bool:
        return any(within(parameter, name) for name in self.needs.present)


def _leave_alone(model: nn.Module, needs: Needs) -> None:
    """Keep transformers from initialising modules whose parts are absent, which it does by looking into these parts.

    One with buffers of its own is left to it: these are in no file.
    """
    for name in needs.absent():
        for end in [0, *(place for place, letter in enumerate(name) if letter == ".")]:
            module = model.get_submodule(name[:end]) if end else model
            if not module._buffers:  # pyright: ignore[reportPrivateUsage]
                vars(module)["_is_hf_initialized"] = True


@attrs.frozen
class Filler:
    """``build(stage)`` of any other module: the piece as the controller cut it, filled from the files."""

    piece: nn.Module
    path: str
    dtype: torch.dtype | Literal["auto"]
    aliases: dict[str, list[str]]
    """All names of tensors that the whole model has under several: files have one of them."""
    _read: dict[int, Any] = attrs.field(factory=dict[int, Any], init=False, eq=False)

    @property
    def nbytes(self) -> int:
        """Of all that it loads."""
        return sum({id(tensor): tensor.nbytes for _, tensor in _tensors_of(self.piece)}.values())

    def loaded_bytes(self) -> int:
        """Bytes that are there by now; may be called from another thread."""
        return sum(one.nbytes for one in [*self._read.values()])

    def __call__(self, _info: StageInfo) -> nn.Module:
        """Load it."""
        files = _keys_of(Path(self.path).expanduser())
        safetensors: Any = importlib.import_module("safetensors")
        read = self._read
        missing: list[str] = []
        with contextlib.ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, tensor in _tensors_of(self.piece):
                if id(tensor) in read:
                    continue
                key = next((one for one in self.aliases.get(name, [name]) if one in files), None)
                if key is None:
                    missing.append(name)
                    continue
                file = files[key]
                if file not in opened:
                    opened[file] = stack.enter_context(safetensors.safe_open(file, "pt"))
                found: Tensor = opened[file].get_tensor(key)
                if found.shape != tensor.shape:
                    raise ValueError(
                        f"A weight in the files has the shape of its parameter: found {tuple(found.shape)} for {name} of "
                        f"{tuple(tensor.shape)} in {file}"
                    )
                if found.is_floating_point() and self.dtype != "auto":
                    found = found.to(self.dtype)
                read[id(tensor)] = nn.Parameter(found, requires_grad=False) if isinstance(tensor, nn.Parameter) else found
        if missing:
            raise ValueError(
                f"A stage's weights are all in the files: found none for {', '.join(missing[:5])} in {self.path}"
            )
        for module in self.piece.modules():
            for held in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
                for name, tensor in held.items():
                    if tensor is not None and id(tensor) in read:
                        held[name] = read[id(tensor)]
        return self.piece


def aliases_of(module: nn.Module) -> dict[str, list[str]]:
    """Of each tensor that has several names, these, by each of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors_of(module):
        names.setdefault(id(tensor), []).append(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What is loaded of it: what its state dict has, and what has no value; under each of its names."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    saved = module.state_dict(keep_vars=True)
    return [(name, tensor) for name, tensor in named if name in saved or tensor.is_meta]


def _keys_of(place: Path) -> dict[str, Path]:
    """Which file has which key."""
    if place.is_dir() and (index := place / "model.safetensors.index.json").exists():
        return {key: place / file for key, file in json.loads(index.read_text())["weight_map"].items()}
    safetensors: Any = importlib.import_module("safetensors")
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    found: dict[str, Path] = {}
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found
