// A classic dashboard, drawn with Grafana's own components on its grid of 24 columns.
import React, { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { createTheme, ThemeContext } from '@grafana/data';
import { GlobalStyles, PanelChrome, PortalContainer } from '@grafana/ui';
import { scene } from './frames.js';
import { Drawing, loaded } from './panels.jsx';
import { registerTransformers } from './registries.js';
import { GAP, ROW_HEIGHT, TITLE_HEIGHT, heightOf, within } from './grid.js';

const view = scene(location.search);
const theme = createTheme({ colors: { mode: view.theme } });
registerTransformers();

function box({ x, y, w, h }) {
  const column = view.width / 24;
  return { position: 'absolute', left: x * column + GAP, top: y * ROW_HEIGHT + TITLE_HEIGHT,
    width: w * column - 2 * GAP, height: h * ROW_HEIGHT - 2 * GAP };
}

function Panel({ panel, result }) {
  const place = box(panel.gridPos);
  if (panel.type === 'row') return <div style={{ ...place, color: theme.colors.text.primary }}>{panel.title}</div>;
  const empty = result.error ?? (result.frames.some(frame => frame.length) ? null : 'No data');
  return <div style={place}>
    <PanelChrome title={panel.title} description={panel.description} width={place.width} height={place.height}>
      {(width, height) => empty
        ? <div style={{ padding: 16, color: theme.colors.text.secondary }}>{panel.fieldConfig.defaults.noValue ?? empty}</div>
        : <Drawing panel={panel} {...result} view={view} theme={theme} width={width} height={height} />}
    </PanelChrome>
  </div>;
}

function Board() {
  const [shown, show] = useState(null);
  useEffect(() => {
    (async () => {
      const board = within(await (await fetch('/dashboard.json')).json(), view.rows);
      const asked = board.panels.map(panel => panel.type === 'row' ? {} : loaded(panel, view, theme));
      const results = await Promise.all(asked.map(result => Promise.resolve(result).catch(error => ({ error: error.message }))));
      show({ board, results });
    })();
  }, []);
  if (!shown) return null;
  const { board, results } = shown;
  const page = { position: 'relative', width: view.width, height: heightOf(board), background: theme.colors.background.canvas };
  return <div style={page}>
    <div style={{ padding: '12px 8px', fontSize: 18, color: theme.colors.text.primary }}>{board.title}</div>
    {board.panels.map((panel, index) => <Panel key={panel.id} panel={panel} result={results[index]} />)}
  </div>;
}

createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}><GlobalStyles /><Board /><PortalContainer /></ThemeContext.Provider>);
