// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// sample is what was measured, in no order.
type sample []time.Duration

// quantile returns the smallest value that at least the share q of the sample does not exceed.
func (s sample) quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	rank := int(q*float64(len(sorted)) + 0.999999)
	return sorted[min(max(rank, 1), len(sorted))-1]
}

func (s sample) median() time.Duration { return s.quantile(0.5) }

// ms and seconds are how a time is printed.
func ms(d time.Duration) string      { return fmt.Sprintf("%.0f ms", float64(d)/float64(time.Millisecond)) }
func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// quantiles are p50, p90, p99 and the most, as cells.
func (s sample) quantiles() []string {
	return []string{ms(s.quantile(0.5)), ms(s.quantile(0.9)), ms(s.quantile(0.99)), ms(s.quantile(1))}
}

// spread is min, median and max.
func (s sample) spread() string {
	return fmt.Sprintf("%.1f / %.1f / %.1f s", s.quantile(0).Seconds(), s.median().Seconds(), s.quantile(1).Seconds())
}

// table is one in Markdown.
type table struct {
	head []string
	rows [][]string
}

func newTable(head ...string) *table { return &table{head: head} }

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// String prints it so that it can be read as it is, too.
func (t *table) String() string {
	width := make([]int, len(t.head))
	for _, row := range append([][]string{t.head}, t.rows...) {
		for i, cell := range row {
			width[i] = max(width[i], len([]rune(cell)))
		}
	}
	var b strings.Builder
	line := func(row []string) {
		for i := range t.head {
			cell := ""
			if i < len(row) {
				cell = row[i]
			}
			fmt.Fprintf(&b, "| %s%s ", cell, strings.Repeat(" ", width[i]-len([]rune(cell))))
		}
		b.WriteString("|\n")
	}
	line(t.head)
	for _, w := range width {
		b.WriteString("|" + strings.Repeat("-", w+2))
	}
	b.WriteString("|\n")
	for _, row := range t.rows {
		line(row)
	}
	return b.String()
}

// roundToSum returns the values in units, rounded so that they add up to the rounded sum: those that lose
// most by being cut off get the units that are missing.
func roundToSum(values []time.Duration, unit time.Duration) []int {
	var sum time.Duration
	type share struct {
		at   int
		rest time.Duration
	}
	rounded, shares := make([]int, len(values)), make([]share, len(values))
	missing := 0
	for i, v := range values {
		sum += v
		rounded[i] = int(v / unit)
		shares[i] = share{i, v % unit}
		missing -= rounded[i]
	}
	missing += int((sum + unit/2) / unit)
	slices.SortStableFunc(shares, func(a, b share) int { return int(b.rest - a.rest) })
	for i := range missing {
		rounded[shares[i].at]++
	}
	return rounded
}
