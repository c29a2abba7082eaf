# The five commands of a contributor. Every one makes .venv first, if it is not there.
.PHONY: test check docs release clean

test: ## everything that CI runs; ARGS="tests/sharding -k qwen3" for a part
	./launch/test.sh $(ARGS)

check: ## ruff and mypy alone: seconds
	./launch/bootstrap.sh
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

docs: ## pages made from the code, then the site at http://127.0.0.1:8000
	./launch/bootstrap.sh
	.venv/bin/python tools/write_docs.py
	.venv/bin/python -m mkdocs serve

release: ## dist/: a source archive and a wheel, checked as an index of packages would
	./launch/bootstrap.sh
	rm -rf build dist
	.venv/bin/python -m build
	.venv/bin/python -m twine check --strict dist/*

clean: ## what builds and tools leave behind; runs and .venv stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
