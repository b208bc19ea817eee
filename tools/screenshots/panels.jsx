// One panel: its data through its own transformations and field options, drawn by Grafana's component for its type.
import React from 'react';
import { firstValueFrom } from 'rxjs';
import { applyFieldOverrides, dateTime, FieldType, getDisplayProcessor, getDisplayValueAlignmentFactors,
  getFieldDisplayValues, transformDataFrame } from '@grafana/data';
import { BarGauge, BigValue, Table, TimeSeries, VizRepeater } from '@grafana/ui';
import { filled, framesOf } from './frames.js';
import { completed, optionsOf } from './registries.js';

/** Asks for a panel's data; answers its frames, ready to be drawn, and its field configuration. */
export async function loaded(panel, view, theme) {
  const replaceVariables = text => filled(text, view);
  let data = (await Promise.all(panel.targets.map(target => framesOf(target, view)))).flat();
  if (panel.transformations?.length) {
    data = await firstValueFrom(transformDataFrame(panel.transformations, data, { interpolate: replaceVariables }));
  }
  const fieldConfig = completed(panel);
  const frames = applyFieldOverrides({
    data, fieldConfig, fieldConfigRegistry: optionsOf(fieldConfig), replaceVariables, theme, timeZone: 'utc' });
  return { frames, fieldConfig };
}

export function Drawing({ panel, frames, fieldConfig, view, theme, width, height }) {
  const size = { width, height };
  const [from, to] = [dateTime(view.start * 1000), dateTime(view.end * 1000)];
  const timeRange = { from, to, raw: { from, to } };
  if (panel.type === 'timeseries') {
    return <TimeSeries {...size} frames={frames} timeRange={timeRange} timeZone="utc" legend={panel.options.legend}
      options={panel.options} />;
  }
  if (panel.type === 'table') {
    return <Table {...size} data={frames[0]} timeRange={timeRange} columnMinWidth={80} />;
  }
  const values = getFieldDisplayValues({
    fieldConfig, reduceOptions: panel.options.reduceOptions, data: frames, theme, timeZone: 'utc',
    replaceVariables: text => filled(text, view) });
  const Single = panel.type === 'bargauge' ? Bar : Big;
  return <VizRepeater {...size} source={values} getValues={() => values} itemSpacing={8} orientation="horizontal"
    getAlignmentFactors={getDisplayValueAlignmentFactors}
    renderValue={drawn => <Single {...drawn} panel={panel} theme={theme} />} />;
}

function Bar({ value, width, height, alignmentFactors, theme, panel }) {
  const display = getDisplayProcessor({ field: { type: FieldType.number, config: value.field }, theme });
  return <BarGauge value={value.display} field={value.field} display={display} alignmentFactors={alignmentFactors}
    width={width} height={height} theme={theme} orientation="horizontal" displayMode={panel.options.displayMode}
    text={{ titleSize: 14, valueSize: 16 }} lcdCellWidth={10} itemSpacing={8} />;
}

function Big({ value, width, height, theme, panel }) {
  const display = { ...value.display, title: undefined };
  return <BigValue value={display} width={width} height={height} theme={theme} colorMode={panel.options.colorMode}
    graphMode="none" justifyMode="center" text={{ valueSize: 28 }} />;
}
