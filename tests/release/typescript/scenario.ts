// What a client in TypeScript does with the service: `node scenario.js URL TOKEN`.

import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

type Project = components["schemas"]["Project"];
type Point = components["schemas"]["Point"];
type Problem = components["schemas"]["Problem"];
type InvalidProblem = components["schemas"]["InvalidProblem"];

declare const process: { argv: string[] };
const [, , baseUrl, token] = process.argv;
const client = createClient<paths>({
  baseUrl,
  headers: { Authorization: `Bearer ${token}` },
});
const PROJECTS = "/api/v1/gardening/projects";
const PROJECT = "/api/v1/gardening/projects/{projectId}";

function equal(found: unknown, expected: unknown): void {
  if (JSON.stringify(found) !== JSON.stringify(expected)) {
    throw new Error(`${JSON.stringify(found)} is not ${JSON.stringify(expected)}`);
  }
}

function present<T>(value: T | undefined): T {
  if (value === undefined) throw new Error("no such response");
  return value;
}

const at = (id: string) => ({ path: { projectId: id } });
const point: Point = { type: "Point", coordinates: [-122.4410896675, 37.768361565] };

const bare: Project = present((await client.POST(PROJECTS, { body: {} })).data);
equal(bare.location, null);
const key = { header: { "Idempotency-Key": "k" } };
const body = { name: "Park", postal_code: "94117", location: point };
const park: Project = present((await client.POST(PROJECTS, { params: key, body })).data);
equal(park.location, point);

const read: Project = present((await client.GET(PROJECT, { params: at(park.id) })).data);
equal(read, park);
const list = present((await client.GET(PROJECTS)).data);
if (!Array.isArray(list)) throw new Error("not a list");
equal(list, [bare, park]);
const query = { page: 1, size: 1 };
const page = present((await client.GET(PROJECTS, { params: { query } })).data);
if (Array.isArray(page)) throw new Error("not a page");
equal(page, { projectList: [park], page: 1, size: 1, total: 2 });

for (const project of list) {
  const sent = { ...project, name: "Garden" };
  const response = await client.PUT(PROJECT, { params: at(project.id), body: sent });
  const changed: Project = present(response.data);
  equal(changed, { ...sent, updated_at: changed.updated_at, version: 2 });
}

const south = { body: { location: { ...point, coordinates: [0, 91] } } };
const invalid: InvalidProblem | Problem = present((await client.POST(PROJECTS, south)).error);
if (!("errors" in invalid)) throw new Error("no errors");
equal([invalid.status, invalid.type], [422, "about:blank"]);
equal(Object.keys(invalid.errors), ["location"]);
const other = { params: key, body: { name: "Other" } };
const reused: InvalidProblem | Problem = present((await client.POST(PROJECTS, other)).error);
equal([reused.status, reused.type], [422, "urn:gardening:key-reused"]);
const params = { ...at(park.id), header: { "If-Match": '"1-1"' } };
const stale: Problem = present((await client.DELETE(PROJECT, { params })).error);
equal([stale.status, stale.type], [412, "about:blank"]);
equal((await client.DELETE(PROJECT, { params: at(park.id) })).error, undefined);
const spent: Problem = present((await client.POST(PROJECTS, { params: key, body })).error);
equal([spent.status, spent.type], [409, "urn:gardening:key-spent"]);
