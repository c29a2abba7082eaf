# Commands for contributors. Each one creates .venv first if it does not exist.
.PHONY: test check docs release clean

test: ## run what CI runs; ARGS="tests/sharding -k qwen3" for a part
	./launch/test.sh $(ARGS)

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
