// node shoot.mjs PROMETHEUS DASHBOARD.json OUT.png 'theme=light&end=…&range=…&scrape=…&width=…&rows=…'
//
// Draws a dashboard into a picture: bundles the page, serves it with the API of a Prometheus behind it, and has headless
// Chromium look at it. CHROMIUM names the program, DEBUG=1 shows what the page complains about.
import { build } from 'esbuild';
import { spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { heightOf, within } from './grid.js';

const [prometheus, dashboard, out, query] = process.argv.slice(2);
const here = dirname(fileURLToPath(import.meta.url));
const modules = join(here, 'node_modules');
const built = mkdtempSync(join(tmpdir(), 'sojourn-shot-'));
const PAGE = '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="/board.css"><style>body{margin:0}</style>'
  + '<div id="root"></div><script type="module" src="/board.js"></script>';
const TYPES = { js: 'text/javascript', css: 'text/css', svg: 'image/svg+xml', json: 'application/json', woff2: 'font/woff2' };

// The CommonJS builds, since old packages have default exports; nothing of code editors and maps, which are not shown.
const lean = { name: 'lean', setup({ onResolve, onLoad }) {
  const resolve = createRequire(import.meta.url).resolve;
  onResolve({ filter: /^@grafana\/(ui|data)$/ }, ({ path }) => ({ path: resolve(path) }));
  onResolve({ filter: /^(@monaco-editor\/react|monaco-editor|ol)(\/|$)/ }, ({ path }) => ({ path, namespace: 'nothing' }));
  onLoad({ filter: /.*/, namespace: 'nothing' },
    () => ({ contents: 'module.exports = new Proxy({}, { get: () => () => null })' }));
} };

function content(path) {
  if (path === '/') return PAGE;
  if (path === '/dashboard.json') return readFileSync(dashboard);
  if (path.includes('/fonts/inter/')) {
    return readFileSync(join(modules, `@fontsource/inter/files/inter-latin-${path.includes('Medium') ? 500 : 400}-normal.woff2`));
  }
  const file = path.includes('/img/icons/')
    ? join(modules, '@grafana/ui/dist/public', path.slice(path.indexOf('/img/'))) : join(built, path);
  return existsSync(file) ? readFileSync(file) : null;
}

async function answer(request, response) {
  if (request.url.startsWith('/api/')) {
    const asked = await fetch(prometheus + request.url);
    response.writeHead(asked.status, { 'content-type': 'application/json' }).end(await asked.text());
    return;
  }
  const path = request.url.split('?')[0], found = content(path);
  response.writeHead(found ? 200 : 404, { 'content-type': TYPES[path.split('.').pop()] ?? 'text/html' }).end(found ?? '');
}

await build({
  entryPoints: [join(here, 'board.jsx')], outdir: built, bundle: true, minify: true, format: 'esm', jsx: 'automatic',
  logLevel: 'error', plugins: [lean],
  define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}', global: 'globalThis' },
});
const server = createServer(answer).listen(0, '127.0.0.1', () => {
  const given = new URLSearchParams(query);
  // The window must be as high as the board: what is below it would not be drawn.
  const height = heightOf(within(JSON.parse(readFileSync(dashboard)), Number(given.get('rows') ?? 99)));
  const debugging = Boolean(process.env.DEBUG);
  const chromium = spawn(process.env.CHROMIUM ?? 'chromium', [
    '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', `--user-data-dir=${join(built, 'profile')}`,
    ...(debugging ? ['--enable-logging=stderr'] : []), `--window-size=${given.get('width') ?? 1400},${height}`,
    '--virtual-time-budget=20000', `--screenshot=${out}`, `http://127.0.0.1:${server.address().port}/?${query}`,
  ], { stdio: ['ignore', 'ignore', debugging ? 'inherit' : 'ignore'] });
  chromium.on('exit', code => {
    server.close();
    rmSync(built, { recursive: true, force: true });
    process.exit(code ?? 1);
  });
});
