// Answers of Prometheus' HTTP API as Grafana's data frames.
import { FieldType, toDataFrame } from '@grafana/data';

/** What is drawn: when, how finely, and what the variables stand for. */
export function scene(search) {
  const given = new URLSearchParams(search);
  const number = (name, otherwise) => Number(given.get(name) ?? otherwise);
  const end = number('end', Date.now() / 1000);
  const range = number('range', 600);
  const scrape = number('scrape', 2);
  const step = Math.max(scrape, Math.ceil(range / 400));
  return {
    theme: given.get('theme') ?? 'dark', width: number('width', 1400), rows: number('rows', 99),
    start: end - range, end, step,
    variables: {
      datasource: 'prometheus', namespace: '.+', model: '.+', pod: '.+', __interval: `${step}s`,
      // As Grafana has it: the step and one scrape more, at least four scrapes.
      __rate_interval: `${Math.max(step + scrape, 4 * scrape)}s`, __range: `${range}s`,
    },
  };
}

export const filled = (text, { variables }) =>
  text.replace(/\$\{(\w+)[^}]*\}|\$(\w+)/g, (all, braced, plain) => variables[braced ?? plain] ?? all);

/** The frames of one target of a panel. */
export async function framesOf(target, view) {
  const expr = encodeURIComponent(filled(target.expr, view));
  const path = target.instant
    ? `query?time=${view.end}&query=${expr}`
    : `query_range?start=${view.start}&end=${view.end}&step=${view.step}&query=${expr}`;
  const answer = await (await fetch(`/api/v1/${path}`)).json();
  if (answer.status !== 'success') throw new Error(`${target.expr}: ${answer.error}`);
  const series = answer.data.result;
  return target.format === 'table' ? [tableFrame(target, series)] : series.map(one => seriesFrame(target, one, view));
}

function tableFrame({ refId }, series) {
  const labels = [...new Set(series.flatMap(one => Object.keys(one.metric)))].sort();
  const column = name => ({ name, type: FieldType.string, values: series.map(one => one.metric[name] ?? '') });
  return toDataFrame({ refId, fields: [
    { name: 'Time', type: FieldType.time, values: series.map(one => one.value[0] * 1000) },
    ...labels.map(column),
    { name: `Value #${refId}`, type: FieldType.number, values: series.map(one => Number(one.value[1])) },
  ] });
}

function seriesFrame({ refId, legendFormat }, { metric, value, values }, { step }) {
  const points = values ?? [value];
  const name = (legendFormat || '').replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => metric[label] ?? '');
  return toDataFrame({ refId, fields: [
    { name: 'Time', type: FieldType.time, values: points.map(point => point[0] * 1000), config: { interval: step * 1000 } },
    { name: 'Value', type: FieldType.number, labels: metric, values: points.map(point => Number(point[1])),
      config: { displayNameFromDS: name || undefined } },
  ] });
}
