"""The documentation site: `make docs` turns the pages of docs/ into the folder site/.

`nav.toml` says which pages there are, in which order. `staging.py` writes all of them into one
folder, with the pages that are made from the library itself, and Sphinx builds that folder with the
settings in `conf.py`.
"""
