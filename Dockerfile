# Router, poller and simulated replica in one image: `docker build -t extproc .`

FROM python:3.11-slim AS build
WORKDIR /src
# Every wheel is checked against its hash here. The lock file also holds what tests and demo need;
# only what the package itself depends on is installed below.
COPY requirements.txt .
RUN pip download --quiet --require-hashes --dest /wheels -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY extproc extproc
RUN python -m venv /opt/extproc \
 && /opt/extproc/bin/pip install --quiet --no-index --find-links /wheels ".[tokenizers]" \
 && /opt/extproc/bin/pip uninstall --quiet --yes pip setuptools

FROM python:3.11-slim
COPY --from=build /opt/extproc /opt/extproc
ENV PATH=/opt/extproc/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["extproc"]
CMD ["serve"]
