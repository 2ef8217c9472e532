package table

import (
	"fmt"
	"math/bits"
	"strings"
	"time"
)

// mostRows is the largest number of rows of a statement. Each text costs a session 3.5 kB for a row.
const mostRows = 64

// rowsOf returns how many of n rows the next statement has. A session keeps each text that it has
// prepared. So only numbers whose bits after the first four are 0 have a text.
func rowsOf(n int) int {
	n = min(n, mostRows)
	return n &^ (1<<max(bits.Len(uint(n))-4, 0) - 1)
}

// The rows of a statement have their key, their shard and the value that a new row is left with; those of a
// window also an instant from which to count its edges.
const (
	bucketRow = "($1::text, $%[1]d::text, $%[2]d::int4, $%[3]d::float8, coalesce($5::timestamptz, clock_timestamp()))"
	windowRow = "($1::text, $%[1]d::text, $%[2]d::int4, $%[3]d::float8, " +
		"date_bin($4::float8 * interval '1 microsecond', coalesce($5::timestamptz, clock_timestamp()), $%[4]d::timestamptz))"
)

// partTexts returns the statements by their number of rows. text is all but the rows.
func partTexts(text, row string) map[int]string {
	if text == "" {
		return nil
	}
	texts, rows, columns := make(map[int]string), make([]string, mostRows), strings.Count(row, "%")
	for i := range rows {
		first := 6 + columns*i
		rows[i] = fmt.Sprintf(row, first, first+1, first+2, first+3)
		if n := i + 1; n == rowsOf(n) {
			texts[n] = fmt.Sprintf(text, strings.Join(rows[:n], ", "))
		}
	}
	return texts
}

// partArgs returns the arguments of a statement: those of the definition, and then those of each row.
func partArgs(grants []Grant, now *time.Time) []any {
	d := &grants[0].Definition
	args := append(make([]any, 0, 5+4*len(grants)), grants[0].Name, d.Capacity, d.Rate, d.Micros(), now)
	for i := range grants {
		g := &grants[i]
		if args = append(args, g.Key.Key, int32(g.Shard), d.Capacity-g.Count); d.Stepped() {
			args = append(args, origin(d, g.Key.Key, time.Time{}, now))
		}
	}
	return args
}
