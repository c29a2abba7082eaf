# Commands for contributors. Each one creates .venv first if it does not exist.
.PHONY: test check docs release clean

# `make t=tests/sharding/test_rows.py` runs tests alone, without ruff, mypy and further locks.
test: ## run what CI runs; t=PATH: these tests alone
ifdef t
	test -x .venv/bin/python || ./launch/bootstrap.sh
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= \
		.venv/bin/python -m pytest -q $(t)
else
	./launch/test.sh $(ARGS)
endif

check: ## run only ruff and mypy
	./launch/bootstrap.sh
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

docs: ## update generated pages and serve the site at http://127.0.0.1:8000
	./launch/bootstrap.sh
	.venv/bin/python tools/write_docs.py
	.venv/bin/python -m mkdocs serve

release: ## build and check dist/: a source archive and a wheel
	./launch/bootstrap.sh
	rm -rf build dist
	.venv/bin/python -m build
	.venv/bin/python -m twine check --strict dist/*

clean: ## remove build and tool files; keep runs and .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
