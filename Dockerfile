ARG PYTHON=python:3.14-slim
FROM ${PYTHON} AS service

RUN useradd --uid 10001 --home-dir /data gardening \
    && install --directory --owner gardening --group gardening --mode 700 /data
VOLUME /data

WORKDIR /opt/gardening
ENV PATH=/opt/gardening/.venv/bin:$PATH \
    GARDENING_DATABASE=/data/gardening.db \
    TMPDIR=/data \
    PORT=8000
EXPOSE 8000
CMD ["gunicorn"]
HEALTHCHECK --timeout=10s --start-period=30s CMD ["python", "deploy/healthcheck.py"]

COPY constraints.txt requirements.txt ./
RUN python3 -m venv --without-pip .venv \
    && pip --python .venv/bin/python install --no-cache-dir \
        --requirement requirements.txt "psycopg[binary]"

COPY --chmod=644 *.py openapi.json ./
COPY --chmod=644 engines/*.py engines/*.sql engines/
COPY --chmod=644 deploy/healthcheck.py deploy/
# Check that the service loads, and compile it now: its user cannot write bytecode.
RUN gunicorn --check-config && python -m compileall -q *.py engines
# By number: Kubernetes cannot tell whether a name is root.
USER 10001

# For other teams' tests: docker build --target test
FROM service AS test
USER root
COPY --chmod=644 testservice/*.py testservice/
RUN python -m compileall -q testservice \
    && printf '#!/bin/sh\ncd /opt/gardening && exec python -E -m testservice "$@"\n' \
        > .venv/bin/gardening-test-service \
    && chmod 755 .venv/bin/gardening-test-service
USER 10001
CMD ["gardening-test-service", "--bind", "0.0.0.0:8000"]

# The last stage is the one that is built by default.
FROM service
