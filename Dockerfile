FROM python:3.13-slim

RUN useradd --uid 10001 --home-dir /data gardening \
    && install --directory --owner gardening --group gardening --mode 700 /data
VOLUME /data

WORKDIR /opt/gardening
ENV PATH=/opt/gardening/.venv/bin:$PATH \
    FLASK_DATABASE=/data/gardening.db \
    GARDENING_BIND=0.0.0.0:8000
EXPOSE 8000
CMD ["gunicorn"]

COPY requirements.txt .
RUN python3 -m venv .venv \
    && pip install --no-cache-dir --requirement requirements.txt "psycopg[binary]==3.3.9" \
    && printf '#!/bin/sh\nexec python /opt/gardening/testservice.py "$@"\n' \
        > .venv/bin/gardening-test-service \
    && chmod 755 .venv/bin/gardening-test-service

COPY --chmod=644 *.py openapi.json ./
# The service can be imported, and its bytecode is in the image: its user cannot write any.
RUN FLASK_DATABASE=:memory: gunicorn --check-config && python -m compileall -q *.py
# By number, since Kubernetes does not see from a name that it is not root.
USER 10001
